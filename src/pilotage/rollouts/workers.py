"""Processes that run trials, because the OpenHands SDK costs 14 to 20 ms of Python a model call.

    run(spec) --Run--> least loaded worker: many trials in one event loop --Done--> report
                         | Enter: a phase begins      ^ Entered: there is a slot for it
                         +-----> slots of the driver -+

Where they run is their pool's: `LocalWorkers` has them on this machine, `HostWorkers` on those of a cluster.
Invariant: every `run` gets exactly one report. A worker that is lost gives its trials a fault, and its pool
starts another.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pilotage.rollouts.frames import Cancel, Done, Enter, Entered, Frames, Ready, Run
from pilotage.rollouts.limits import PoolSlots
from pilotage.rollouts.report import TrialFault, TrialPhase, TrialReport
from pilotage.rollouts.trial import TrialSpec

_log = logging.getLogger(__name__)

_CANCEL_WAIT_S = 20.0
_CLOSE_WAIT_S = 20.0


class WorkerProcess(Protocol):
    """A worker's process, as far as the driver can reach it."""

    async def ended(self, lost: Sequence[TrialSpec]) -> str:
        """Wait until it has ended, its connection being gone, and clear what trials that it had left behind.

        Returns how it ended, as in "it died".
        """
        ...

    def kill(self) -> None:
        """End it, if it has not ended and can be ended from here."""
        ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A trial that runs in a worker."""

    spec: TrialSpec
    slots: PoolSlots
    report: asyncio.Future[TrialReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    entering: asyncio.Queue[TrialPhase] = field(default_factory=asyncio.Queue[TrialPhase])
    """Phases that it wants a slot of: one at most, put by the reader, taken by `TrialWorkers.run`."""


class Worker:
    """The driver's end of one process."""

    def __init__(self, process: WorkerProcess, frames: Frames) -> None:
        self.process = process
        self.frames = frames
        self.pending: dict[int, _Pending] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has imported everything, or is gone."""
        self.is_gone = False
        """Whether it can be given no more trials."""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for frame in self.frames:
                self._take(frame)
        except ValueError as error:
            _log.warning("a rollout worker sent what cannot be read: %s", error)
            self.process.kill()
        self.is_gone = True
        self.frames.close()
        lost = list(self.pending.values())
        end = await self.process.ended([trial.spec for trial in lost])
        if not self.ready.done():
            self.ready.set_result(None)
        self.pending.clear()
        if lost:
            _log.warning("a rollout worker is lost, %s; %d trials are lost with it", end, len(lost))
        for trial in lost:
            trial.report.set_result(_lost_report(end))

    def _take(self, frame: object) -> None:
        if isinstance(frame, Ready) and not self.ready.done():
            self.ready.set_result(None)
        elif isinstance(frame, Enter) and (trial := self.pending.get(frame.number)) is not None:
            trial.slots.release()
            if frame.phase is not None:
                trial.entering.put_nowait(frame.phase)
        elif isinstance(frame, Done) and (trial := self.pending.pop(frame.number, None)) is not None:
            trial.report.set_result(frame.report)

    async def close(self) -> None:
        """Have it cancel what runs and end; kill it where it does not."""
        self.frames.end()
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), _CLOSE_WAIT_S)
        except TimeoutError:
            self.process.kill()
            self.frames.close()
            await self._reading


def _lost_report(end: str) -> TrialReport:
    message = f"the worker process that ran the trial is lost, {end}"
    return TrialReport(fault=TrialFault(phase=TrialPhase.AGENT, kind="WorkerDied", message=message))


async def _give_slots(worker: Worker, number: int, trial: _Pending) -> None:
    """Give a trial the slots that it asks for, one after another."""
    with contextlib.suppress(ConnectionError):  # its end is noticed by whoever reads
        while True:
            await trial.slots.enter(await trial.entering.get())
            await worker.frames.send(Entered(number=number))


class WorkerPool(Protocol):
    """Starts workers, and replaces those that are gone."""

    async def start(self) -> None:
        """Start the first ones.

        Raises:
            ConfigError: none can be started.
        """
        ...

    async def workers(self) -> Sequence[Worker]:
        """Return those that take trials, at least one; waits until there is one."""
        ...

    async def close(self) -> None:
        """Cancel what runs and end the processes."""
        ...


class TrialWorkers:
    """Runs trials in the workers of a pool."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the processes."""
        await self._pool.start()

    async def run(self, spec: TrialSpec, slots: PoolSlots) -> TrialReport:
        """Run one trial in the least loaded worker; cancelling it waits until the trial has stopped."""
        worker = min(await self._pool.workers(), key=lambda candidate: len(candidate.pending))
        number = next(self._numbers)
        pending = worker.pending[number] = _Pending(spec=spec, slots=slots)
        giving = asyncio.create_task(_give_slots(worker, number, pending))
        try:
            await asyncio.shield(worker.ready)  # others wait for it too
            with contextlib.suppress(ConnectionError):  # its end is noticed by whoever reads
                await worker.frames.send(Run(number=number, spec=spec, is_limited=slots.is_limited))
            return await asyncio.shield(pending.report)
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_CANCEL_WAIT_S):
                    await worker.frames.send(Cancel(number=number))
                    await asyncio.shield(pending.report)
            raise
        finally:
            giving.cancel()
            worker.pending.pop(number, None)

    async def close(self) -> None:
        """Cancel what runs and end the processes."""
        await self._pool.close()
