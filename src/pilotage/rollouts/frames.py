"""Messages between the driver and a worker: pickled records, each with its length before it.

Both ends are processes of one user that run this code; nothing else may be connected.
"""

import asyncio
import pickle
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

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


class Frames:
    """One end of the connection; iterating ends when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, frame: Frame) -> None:
        """Send one message.

        Raises:
            ConnectionError: the other end is gone.
        """
        data = pickle.dumps(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    def close(self) -> None:
        """Close this end; the other end's iteration ends."""
        self._writer.close()
