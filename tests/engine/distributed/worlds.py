"""Process groups for tests: ranks in processes of their own that stay up, and one rank in this process."""

import multiprocessing as mp
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pilotage.errors import PilotageError

_TIMEOUT_S = 240.0


class World:
    """Ranks that run the same module-level function at the same time."""

    def __init__(self, num_ranks: int) -> None:
        context = mp.get_context("forkserver")  # imports once, for all ranks
        context.set_forkserver_preload(["tests.engine.distributed.rank_jobs"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        pairs = [context.Pipe() for _ in range(num_ranks)]
        self._pipes: list[Connection] = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, num_ranks, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what each rank returned, or the deliberate error that it raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: list[Any] = []
        for pipe in self._pipes:
            assert pipe.poll(_TIMEOUT_S), f"{function.__name__} does not end on some rank"
            results.append(pipe.recv())
        for result in results:
            if isinstance(result, str):
                raise AssertionError(result)
        return [value for [value] in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    while (message := pipe.recv()) is not None:
        function, arguments = message
        try:
            pipe.send([function(*arguments)])
        except PilotageError as error:
            pipe.send([error])
        except Exception as error:  # noqa: BLE001 - told to the test, which fails with it
            pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
    dist.destroy_process_group()


@contextmanager
def one_rank() -> Generator[None]:
    """Make this process the only rank of a group."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
