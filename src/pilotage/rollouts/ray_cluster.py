"""A Ray cluster as a place for rollout workers.

Ray says which hosts there are and starts processes on them; what they say afterwards does not go through it.
A process of its own speaks to it, see `ray_helper`. Where that dies, with the cluster's head for one, workers
go on, and the next question starts another.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from importlib.util import find_spec
from typing import Any

from pilotage.errors import ConfigError
from pilotage.rollouts.children import start_child
from pilotage.rollouts.hosted_worker import HostOrder, written

_CONNECT_S = 60.0


def check_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("rollouts.ray_address needs Ray: pip install 'pilotage[hosts]'")


class _Helper:
    """A connected helper process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def is_gone(self) -> bool:
        return self._reading.done()

    async def ask(self, **question: str) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            if self.is_gone:
                raise ConnectionError("Ray's head is gone")
            self._writer.write(json.dumps({"id": number, **question}).encode() + b"\n")
            return await answer
        finally:
            del self._asked[number]

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while line := await self._reader.readline():
                answer: dict[str, Any] = json.loads(line)
                asked = self._asked.get(answer["id"])
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionError("Ray's head is gone"))


class RayCluster:
    """Implements `Cluster`."""

    def __init__(self, ray_address: str) -> None:
        """Connect to nothing yet."""
        self._ray_address = ray_address
        self._helper: _Helper | None = None
        self._starting = asyncio.Lock()
        self._address = ""

    @property
    def address(self) -> str:
        """See `Cluster`; known once connected."""
        return self._address

    async def connect(self) -> None:
        """Start the helper where there is none.

        Raises:
            ConfigError: there is no cluster at the address, or this machine is not in it.
        """
        async with self._starting:
            if self._helper is not None and not self._helper.is_gone:
                return
            await self.close()
            self._helper, self._address = await _start_helper(self._ray_address)

    async def hosts(self) -> Mapping[str, str]:
        """See `Cluster`."""
        return (await self._ask())["hosts"]

    async def start_workers(self, host: str, order: HostOrder) -> None:
        """See `Cluster`."""
        await self._ask(host=host, order=written(order))

    async def close(self) -> None:
        """End the helper."""
        helper, self._helper = self._helper, None
        if helper is not None:
            await helper.close()

    async def _ask(self, **question: str) -> dict[str, Any]:
        await self.connect()
        assert self._helper is not None
        answer = await self._helper.ask(**question)
        if "config" in answer:
            raise ConfigError(answer["config"])
        if "lost" in answer:
            raise ConnectionError(answer["lost"])
        return answer


async def _start_helper(ray_address: str) -> tuple[_Helper, str]:
    process, reader, writer = await start_child("pilotage.rollouts.ray_helper", ray_address, is_quiet=True)
    first: dict[str, Any] = {}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                first = json.loads(await reader.readline() or b"{}")
    finally:
        if "address" not in first:
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if "address" not in first:
        said = first.get("config", "Ray does not answer there")
        raise ConfigError(
            f'rollouts.ray_address = "{ray_address}": {said}; this machine begins a cluster, or joins one, by'
            " `ray start`"
        )
    return _Helper(process, reader, writer), first["address"]


@contextlib.asynccontextmanager
async def open_ray(ray_address: str) -> AsyncGenerator[RayCluster]:
    """Use the Ray cluster at an address while the context is open; "auto" is the one of this machine.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or this machine is not in it.
    """
    check_ray()
    cluster = RayCluster(ray_address)
    try:
        await cluster.connect()
        yield cluster
    finally:
        await cluster.close()
