"""Messages between the driver and a worker: records as JSON, each with its length before it.

Both ends run the same Pilotage. Invariant: what is read is data of a known record or an error, never code; so
a worker may be on another host.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from pilotage.rollouts.report import TrialPhase, TrialReport
from pilotage.rollouts.trial import TrialSpec

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has imported everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a trial."""

    number: int
    spec: TrialSpec
    is_limited: bool
    """Whether its phases wait for slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Cancel a trial; its report still comes."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A trial has ended."""

    number: int
    report: TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """A trial has given back its slot and wants one of a phase; None wants none."""

    number: int
    phase: TrialPhase | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The trial has the slot that it asked for."""

    number: int


type Frame = Ready | Run | Cancel | Done | Enter | Entered

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Ready, Run, Cancel, Done, Enter, Entered)
}


def encode(frame: Frame) -> bytes:
    """Return the bytes of a message.

    Raises:
        ValueError: a field holds another type than it is declared with.
    """
    name = type(frame).__name__
    # The standard library's JSON keeps what agents and file systems produce: lone surrogates and infinities.
    return json.dumps([name, _ADAPTERS[name].dump_python(frame, mode="json", warnings="error")]).encode()


def decode(data: bytes) -> Frame:
    """Read what `encode` wrote.

    Raises:
        ValueError: it is something else.
    """
    match json.loads(data):
        case [str(name), body] if name in _ADAPTERS:
            return _ADAPTERS[name].validate_python(body)
        case _:
            raise ValueError(f"no message of ours: {data[:80]!r}")


class Frames:
    """One end of the connection; iterating ends when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, frame: Frame) -> None:
        """Send one message.

        Raises:
            ConnectionError: the other end is gone.
            ValueError: see `encode`; nothing was sent.
        """
        data = encode(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        try:
            await self._writer.drain()
        except OSError as error:  # a host that no longer answers is a timeout, or no route
            raise ConnectionError(str(error)) from error

    async def __aiter__(self) -> AsyncIterator[Frame]:
        """Yield messages.

        Raises:
            ValueError: the other end sent something that is none.
        """
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                return
            yield decode(data)

    def end(self) -> None:
        """Say that nothing more comes from this end; the other end's iteration ends, this one's goes on."""
        with contextlib.suppress(OSError):  # it is gone already
            self._writer.write_eof()

    def close(self) -> None:
        """Close the connection at once, whatever is still to be sent."""
        self._writer.transport.abort()
