"""A few processes that run trials, because the OpenHands SDK costs 14 to 20 ms of Python a model call.

    run(spec) --Run--> least loaded worker: many trials in one event loop --Done--> report
                         | Enter: a phase begins      ^ Entered: there is a slot for it
                         +-----> slots of the driver -+

Invariant: every `run` gets exactly one report. A worker that dies gives its trials a fault and is replaced
when the next trial needs it; what it left behind is swept at once, since its owner is dead.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from dataclasses import dataclass, field

from pilotage.rollouts.frames import Cancel, Done, Enter, Entered, Frames, Ready, Run
from pilotage.rollouts.limits import PoolSlots
from pilotage.rollouts.register import sweep
from pilotage.rollouts.report import TrialFault, TrialPhase, TrialReport
from pilotage.rollouts.trial import TrialSpec

_log = logging.getLogger(__name__)

_CANCEL_WAIT_S = 20.0
_CLOSE_WAIT_S = 20.0


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A trial that runs in a worker."""

    slots: PoolSlots
    report: asyncio.Future[TrialReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    entering: asyncio.Queue[TrialPhase] = field(default_factory=asyncio.Queue[TrialPhase])
    """Phases that it wants a slot of: one at most, put by the reader, taken by `TrialWorkers.run`."""


class _Worker:
    """The driver's end of one process."""

    def __init__(self, process: asyncio.subprocess.Process, frames: Frames) -> None:
        self.process = process
        self.frames = frames
        self.pending: dict[int, _Pending] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reading = asyncio.create_task(self._read())

    @property
    def is_gone(self) -> bool:
        return self.reading.done()

    async def _read(self) -> None:
        async for frame in self.frames:
            if isinstance(frame, Ready):
                self.ready.set_result(None)
            elif isinstance(frame, Enter) and (trial := self.pending.get(frame.number)) is not None:
                trial.slots.release()
                if frame.phase is not None:
                    trial.entering.put_nowait(frame.phase)
            elif isinstance(frame, Done) and (trial := self.pending.pop(frame.number, None)) is not None:
                trial.report.set_result(frame.report)
        code = await self.process.wait()
        self.frames.close()
        if not self.ready.done():
            self.ready.set_result(None)
        lost = [trial.report for trial in self.pending.values() if not trial.report.done()]
        self.pending.clear()
        if lost:
            _log.warning("a rollout worker died with exit code %s; %d trials are lost", code, len(lost))
            await asyncio.to_thread(sweep)
        for future in lost:
            future.set_result(_lost_report(code))

    async def close(self) -> None:
        self.frames.close()
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
        await self.reading


def _lost_report(code: int) -> TrialReport:
    message = f"the worker process that ran the trial died with exit code {code}"
    return TrialReport(fault=TrialFault(phase=TrialPhase.AGENT, kind="WorkerDied", message=message))


async def _start_worker() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "pilotage.rollouts.worker", str(theirs.fileno()), str(os.getpid())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt at the terminal reaches them through us, in order
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    return _Worker(process, Frames(reader, writer))


async def _give_slots(worker: _Worker, number: int, trial: _Pending) -> None:
    """Give a trial the slots that it asks for, one after another."""
    with contextlib.suppress(ConnectionError):  # its end is noticed by whoever reads
        while True:
            await trial.slots.enter(await trial.entering.get())
            await worker.frames.send(Entered(number=number))


class TrialWorkers:
    """A pool of worker processes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()  # two trials must not replace the same dead worker

    async def start(self) -> None:
        """Start the processes; they import while the caller goes on."""
        await self._replace_dead()

    async def run(self, spec: TrialSpec, slots: PoolSlots) -> TrialReport:
        """Run one trial in the least loaded worker; cancelling it waits until the trial has stopped."""
        await asyncio.shield(self._replace_dead())
        worker = min(self._workers, key=lambda candidate: len(candidate.pending))
        number = next(self._numbers)
        pending = worker.pending[number] = _Pending(slots=slots)
        giving = asyncio.create_task(_give_slots(worker, number, pending))
        try:
            await asyncio.shield(worker.ready)  # others wait for it too
            with contextlib.suppress(ConnectionError):  # its end is noticed by whoever reads
                await worker.frames.send(Run(number=number, spec=spec, is_limited=slots.is_limited))
            return await asyncio.shield(pending.report)
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await worker.frames.send(Cancel(number=number))
                await asyncio.wait_for(asyncio.shield(pending.report), _CANCEL_WAIT_S)
            raise
        finally:
            giving.cancel()
            worker.pending.pop(number, None)

    async def close(self) -> None:
        """Cancel what runs and end the processes."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _replace_dead(self) -> None:
        async with self._starting:
            alive = [worker for worker in self._workers if not worker.is_gone]
            missing = self._count - len(alive)
            self._workers = [*alive, *await asyncio.gather(*(_start_worker() for _ in range(missing)))]
