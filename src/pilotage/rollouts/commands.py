"""Run one command in its own process group, with bounded output, and leave nothing of it behind.

Invariant: where the command times out or the caller is cancelled, its process group has been killed before
`run_command` returns or raises. A process that the command moved to another session lives until its sandbox
is stopped.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

_TIMEOUT_EXIT_CODE = 124
"""What coreutils' `timeout` exits with, and what Harbor's own environments report."""
_DRAIN_S = 0.2
"""How long to wait for the end of output after the command ended: a background process may hold the pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What one command did."""

    stdout: str
    stderr: str
    exit_code: int
    """128 + n where signal n ended it; 124 where the time limit did."""
    is_timed_out: bool = False


class BoundedOutput:
    """Keeps the first and the last `limit_bytes / 2` bytes of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(1, limit_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Append a chunk; memory never exceeds the limit by more than one chunk."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (excess := len(self._tail) - self._half) > 0:
            self._dropped += excess
            del self._tail[:excess]

    def text(self) -> str:
        """Return what was kept, with a line that says how much was not."""
        note = f"\n[... {self._dropped} bytes omitted ...]\n".encode() if self._dropped else b""
        return (self._head + note + self._tail).decode(errors="replace")


class _Listener(asyncio.SubprocessProtocol):
    """Collects output and tells when the process ended and when both pipes did."""

    def __init__(self, limit_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.outputs = {1: BoundedOutput(limit_bytes), 2: BoundedOutput(limit_bytes)}
        self.exited: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self._open_pipes = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.outputs[fd].feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if not self._open_pipes and not self.drained.done():
            self.drained.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


async def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float | None,
    output_limit_bytes: int,
) -> CommandResult:
    """Run `argv` with exactly `env` and no input.

    Args:
        timeout_s: the process group is killed after this many seconds; None waits for ever.
        output_limit_bytes: of each of stdout and stderr; the middle of what is longer is dropped.
    """
    loop = asyncio.get_running_loop()
    transport, listener = await started(
        loop.subprocess_exec(
            lambda: _Listener(output_limit_bytes),
            *argv,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        ),
        undo=lambda pair: _abandon(*pair),
    )
    is_timed_out = False
    try:
        try:
            await asyncio.wait_for(asyncio.shield(listener.exited), timeout_s)
        except TimeoutError:
            is_timed_out = True
            await _kill_group(transport, listener)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(listener.drained), _DRAIN_S)
    except asyncio.CancelledError:
        await asyncio.shield(_abandon(transport, listener))
        raise
    transport.close()
    return CommandResult(
        stdout=listener.outputs[1].text(),
        stderr=listener.outputs[2].text(),
        exit_code=_TIMEOUT_EXIT_CODE if is_timed_out else _exit_code(transport),
        is_timed_out=is_timed_out,
    )


async def started[T](start: Coroutine[Any, Any, T], *, undo: Callable[[T], Coroutine[Any, Any, None]]) -> T:
    """Await the start of a process to its end, and undo it where the caller was cancelled meanwhile.

    asyncio kills only the process itself when its start is cancelled, not its group, and may then wait for
    ever for pipes that were not connected yet.
    """
    starting = asyncio.ensure_future(start)

    async def undone() -> None:
        await undo(await starting)

    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(undone())
        raise


async def _abandon(transport: asyncio.SubprocessTransport, listener: _Listener) -> None:
    await _kill_group(transport, listener)
    transport.close()


async def _kill_group(transport: asyncio.SubprocessTransport, listener: _Listener) -> None:
    pid = transport.get_pid()
    if listener.exited.done():  # reaped: the id may belong to someone else by now
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    await listener.exited


def _exit_code(transport: asyncio.SubprocessTransport) -> int:
    code = cast(int, transport.get_returncode())
    return 128 - code if code < 0 else code
