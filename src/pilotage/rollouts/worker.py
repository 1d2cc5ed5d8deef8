"""The program of one worker process beside its driver: `python -m pilotage.rollouts.worker FD PARENT`.

It reads trials from the socket FD, runs many at once in one event loop, and sends each report when it is
done. It ends when the socket closes, after its trials were cancelled, and at once when its parent dies.
`hosted_worker` is the same on another host.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pilotage.processes import end_with_parent
from pilotage.rollouts.frames import Cancel, Done, Enter, Entered, Frames, Ready, Run
from pilotage.rollouts.report import TrialFault, TrialPhase, TrialReport
from pilotage.rollouts.third_party import prepare
from pilotage.rollouts.trial import run_trial

_MAX_TOOL_THREADS = 256
"""Every running tool call of an OpenHands conversation occupies one thread, most of them waiting."""
_PRELOADED = (
    "harbor.trial.trial",
    "pilotage.rollouts.conversation",
    "pilotage.rollouts.host_environment",
    "pilotage.rollouts.openhands_agent",
)
_SHUTDOWN_S = 10.0


class _DriverSlots:
    """A trial's slots, which the driver gives out for all workers."""

    def __init__(self, frames: Frames, number: int) -> None:
        self._frames = frames
        self._number = number
        self._entered = asyncio.Event()

    async def enter(self, phase: TrialPhase) -> None:
        """See `Slots`."""
        self._entered.clear()
        await self._frames.send(Enter(number=self._number, phase=phase))
        await self._entered.wait()

    async def leave(self) -> None:
        """See `Slots`."""
        await self._frames.send(Enter(number=self._number, phase=None))

    def on_entered(self) -> None:
        """Let the trial go on."""
        self._entered.set()


async def _work(frames: Frames) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_TOOL_THREADS, thread_name_prefix="tool"))
    running: dict[int, asyncio.Task[None]] = {}
    slots: dict[int, _DriverSlots] = {}

    async def run(order: Run) -> None:
        if order.is_limited:
            slots[order.number] = _DriverSlots(frames, order.number)
        try:
            report = await run_trial(order.spec, slots.get(order.number))
        except asyncio.CancelledError:
            report = TrialReport(is_cancelled=True)
        finally:
            del running[order.number]
            slots.pop(order.number, None)
        await send_report(frames, order.number, report)

    await frames.send(Ready())
    async for frame in frames:
        if isinstance(frame, Run):
            running[frame.number] = asyncio.create_task(run(frame))
        elif isinstance(frame, Entered) and (waiting := slots.get(frame.number)) is not None:
            waiting.on_entered()
        elif isinstance(frame, Cancel) and (task := running.get(frame.number)) is not None:
            task.cancel()
    tasks = list(running.values())
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_SHUTDOWN_S)


async def send_report(frames: Frames, number: int, report: TrialReport) -> None:
    """Send a report, or, where it holds what no message can, a fault that says so."""
    with contextlib.suppress(ConnectionError):  # nobody is left to read it
        try:
            await frames.send(Done(number=number, report=report))
        except ValueError as error:  # an agent of somebody's wrote facts of other types
            fault = TrialFault(phase=TrialPhase.AGENT, kind="ReportError", message=str(error))
            await frames.send(Done(number=number, report=TrialReport(fault=fault)))


def run_worker(connect: Callable[[], Awaitable[Frames]]) -> None:
    """Connect, import what trials need, work until the driver ends the connection, and exit."""
    prepare()
    gc.disable()  # hundreds of collections of what is there to stay would be a sixth of the import
    asyncio.run(_connect_and_work(connect))
    os._exit(0)  # threads of tools that ignore their end must not hold the process


async def _connect_and_work(connect: Callable[[], Awaitable[Frames]]) -> None:
    frames = await connect()
    for module in _PRELOADED:
        importlib.import_module(module)
    from pilotage.rollouts.remembered_tasks import remember_tasks  # imports Harbor, so only now

    remember_tasks()
    gc.freeze()  # a million objects of imported modules, which every full collection would walk
    gc.enable()
    await _work(frames)


async def _adopt(descriptor: int) -> Frames:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    return Frames(reader, writer)


def main() -> None:
    """Work for the parent."""
    end_with_parent(signal.SIGKILL, parent=int(sys.argv[2]))
    run_worker(partial(_adopt, int(sys.argv[1])))


if __name__ == "__main__":
    main()
