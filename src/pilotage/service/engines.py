"""Engine processes, as the front sees them: start, ask, end, find again.

Each is the leader of a process group of its own. It is named by its id and start time, so that a front that
was restarted finds its engines again and never kills somebody else's process.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pilotage.processes import ProcessIdentity, identify, is_running

_TERMINATE_S = 8.0
_HEALTH_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """How to find an engine process again."""

    process: ProcessIdentity
    socket: Path


class Engine:
    """One engine process."""

    def __init__(self, address: EngineAddress, *, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.address = address
        self._child = child
        transport = httpx.AsyncHTTPTransport(
            uds=str(address.socket), limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
        )
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://engine", timeout=httpx.Timeout(None, connect=5.0)
        )

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        if self._child is not None and self._child.poll() is not None:
            return False
        return is_running(self.address.process)

    async def health(self) -> dict[str, Any] | None:
        """Ask how it is; None where it does not answer."""
        try:
            response = await self.http.get("/health", timeout=_HEALTH_S)
            return response.json()
        except (httpx.HTTPError, ValueError):
            return None

    async def end(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL; returns when it is gone."""
        group = self.address.process.pid
        if self.is_running:
            _signal_group(group, signal.SIGTERM)
            await self._wait_gone(_TERMINATE_S)
        # The leader's death does not end what it started; while that runs, the group's id is nobody else's.
        if identify(group) in (None, self.address.process):
            _signal_group(group, signal.SIGKILL)
        await self._wait_gone(_TERMINATE_S)
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)  # else its entry stays in the process table
        await self.http.aclose()
        shutil.rmtree(self.address.socket.parent, ignore_errors=True)

    async def _wait_gone(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.is_running:  # noqa: ASYNC110 - nobody tells of the end of a process that is not our child
                    await asyncio.sleep(0.02)


def start_engine(command: Sequence[str], directory: Path, socket: Path, log: Path) -> Engine:
    """Start an engine process for the job in `directory`.

    Args:
        command: the program; gets the directory as its last argument.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=directory,
        )
    process = identify(child.pid)
    if process is None:
        process = ProcessIdentity(
            pid=child.pid, started_ticks=-1
        )  # it ended at once; nothing runs under this
    return Engine(EngineAddress(process=process, socket=socket), child=child)


def new_socket() -> Path:
    """Return a path for a socket in a private directory; short, because such paths may have 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="pilotage-engine-")) / "s"


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
