"""Workers on this machine: processes that are connected by a socket pair and die with the driver."""

import asyncio
import contextlib
from collections.abc import Sequence

from pilotage.rollouts.children import start_child
from pilotage.rollouts.frames import Frames
from pilotage.rollouts.register import sweep
from pilotage.rollouts.trial import TrialSpec
from pilotage.rollouts.workers import Worker


class LocalProcess:
    """A child; what it leaves behind is swept at once, since its owner is dead."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def ended(self, lost: Sequence[TrialSpec]) -> str:
        """See `WorkerProcess`."""
        code = await self.child.wait()
        if lost:
            await asyncio.to_thread(sweep)
        return f"it died with exit code {code}"

    def kill(self) -> None:
        """See `WorkerProcess`."""
        with contextlib.suppress(ProcessLookupError):
            self.child.kill()


async def _start_worker() -> Worker:
    process, reader, writer = await start_child("pilotage.rollouts.worker")
    return Worker(LocalProcess(process), Frames(reader, writer))


class LocalWorkers:
    """A pool of `count` processes. One that died is replaced when the next trial needs it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[Worker] = []
        self._starting = asyncio.Lock()  # two trials must not replace the same dead worker

    async def start(self) -> None:
        """See `WorkerPool`; they import while the caller goes on."""
        await self._replace_dead()

    async def workers(self) -> Sequence[Worker]:
        """See `WorkerPool`."""
        await asyncio.shield(self._replace_dead())
        return self._workers

    async def close(self) -> None:
        """See `WorkerPool`."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _replace_dead(self) -> None:
        async with self._starting:
            alive = [worker for worker in self._workers if not worker.is_gone]
            missing = self._count - len(alive)
            self._workers = [*alive, *await asyncio.gather(*(_start_worker() for _ in range(missing)))]
