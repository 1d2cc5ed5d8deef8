"""The processes that read rollouts for the page: replaced where one is killed, gone at once at the end."""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor

from pilotage.processes import KillablePool


class Workers:
    """Runs functions that only read. One that a killed process took along runs again, once."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        """Args:
        make: makes the executor, and its successor where a process of it was killed.
        """
        self._make = make
        self._executor = make()
        self._is_closed = False

    async def call[**P, T](self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function there.

        Raises:
            BrokenExecutor: the process was killed both times, or by `close`.
        """
        executor = self._executor
        try:
            return await _call(executor, function, *args, **kwargs)
        except BrokenExecutor:
            if self._is_closed:
                raise
            if executor is self._executor:  # or else another call has noticed before
                executor.shutdown(wait=False)
                self._executor = self._make()
        return await _call(self._executor, function, *args, **kwargs)

    def close(self) -> None:
        """Take no more calls; what runs goes on."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


async def _call[**P, T](executor: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.wrap_future(executor.submit(function, *args, **kwargs))


class WorkerProcesses(Workers):
    """Workers in processes of their own."""

    def __init__(self, count: int) -> None:
        self._count = count
        super().__init__(self._start)

    def _start(self) -> Executor:
        context = multiprocessing.get_context("spawn")
        self._pool = KillablePool(self._count, mp_context=context, initializer=_ignore_interrupts)
        return self._pool

    def close(self) -> None:
        """End the processes, whatever they read: they hold nothing, and nobody waits for them."""
        self._is_closed = True
        self._pool.kill_workers()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
