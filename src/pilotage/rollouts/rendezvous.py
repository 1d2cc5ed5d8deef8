"""Where workers of other hosts meet their driver: a TCP port at which both sides prove that they have a key.

    driver -> worker    nonce
    worker -> driver    number of its invitation, nonce, proof
    driver -> worker    proof

A proof is an HMAC-SHA256 of who proves and both nonces, under the invitation's key. The key is drawn for one
worker, comes to it another way, is never sent here, and opens one connection. Invariant: no byte of a peer is
decoded before it has proved itself. What follows is authenticated by that alone and not encrypted.
"""

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
import struct
from dataclasses import dataclass

from pilotage.rollouts.frames import Frames

_log = logging.getLogger(__name__)

_NONCE_BYTES = _PROOF_BYTES = 32
_NUMBER = struct.Struct(">Q")
_HANDSHAKE_S = 10.0
_SILENT_S, _PROBE_S, _NUM_PROBES = 10, 5, 3
"""A peer that was silent for so long is asked whether it is there, so often, by the kernel: a host that lost
its power or its network is noticed after 25 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What one worker needs to find its driver."""

    host: str
    port: int
    number: int
    key: str
    """Secret; 32 bytes in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A worker that is expected."""

    invitation: Invitation
    frames: asyncio.Future[Frames]
    """Done when it has come."""


class Rendezvous:
    """The driver's side."""

    def __init__(self, host: str) -> None:
        """`host` is the address of this machine at which workers find it."""
        self._host = host
        self._server: asyncio.Server | None = None
        self._expected: dict[int, Guest] = {}
        self._numbers = itertools.count()

    @property
    def address(self) -> str:
        """Host and port, once it is open."""
        return f"{self._host}:{self._port}"

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: the address is not this machine's.
        """
        self._server = await asyncio.start_server(self._meet, self._host, 0)

    def invite(self) -> Guest:
        """Expect one more worker, until it comes or `withdraw` is called."""
        invitation = Invitation(
            host=self._host, port=self._port, number=next(self._numbers), key=secrets.token_hex(32)
        )
        guest = Guest(invitation=invitation, frames=asyncio.get_running_loop().create_future())
        self._expected[invitation.number] = guest
        return guest

    def withdraw(self, guest: Guest) -> None:
        """Expect it no longer."""
        self._expected.pop(guest.invitation.number, None)

    async def close(self) -> None:
        """Listen no longer; connections stay."""
        if self._server is not None:
            self._server.close()
        self._expected.clear()

    @property
    def _port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                guest = await self._identify(reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            guest = None
        if guest is None or guest.frames.done():
            _log.warning("refused a connection from %s: no worker of ours", writer.get_extra_info("peername"))
            writer.transport.abort()
            return
        _notice_silence(writer)
        guest.frames.set_result(Frames(reader, writer))

    async def _identify(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Guest | None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.write(ours)
        (number,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
        theirs = await reader.readexactly(_NONCE_BYTES)
        proof = await reader.readexactly(_PROOF_BYTES)
        guest = self._expected.get(number)
        if guest is None:
            return None
        key = bytes.fromhex(guest.invitation.key)
        if not hmac.compare_digest(proof, _proof(key, b"worker", ours, theirs)):
            return None
        self.withdraw(guest)
        writer.write(_proof(key, b"driver", ours, theirs))
        await writer.drain()
        return guest


async def meet(invitation: Invitation) -> Frames:
    """Go to the driver that has sent `invitation`.

    Raises:
        OSError: nobody is there who expects this worker.
    """
    reader, writer = await asyncio.open_connection(invitation.host, invitation.port)
    key = bytes.fromhex(invitation.key)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            writer.write(_NUMBER.pack(invitation.number) + ours + _proof(key, b"worker", theirs, ours))
            proof = await reader.readexactly(_PROOF_BYTES)
    except asyncio.IncompleteReadError:
        writer.transport.abort()
        raise ConnectionError("the driver does not expect this worker") from None
    if not hmac.compare_digest(proof, _proof(key, b"driver", theirs, ours)):
        writer.transport.abort()
        raise ConnectionError("who answered is not the driver")
    _notice_silence(writer)
    return Frames(reader, writer)


def _proof(key: bytes, who: bytes, drivers_nonce: bytes, workers_nonce: bytes) -> bytes:
    return hmac.digest(key, who + drivers_nonce + workers_nonce, "sha256")


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SILENT_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, (_SILENT_S + _PROBE_S * _NUM_PROBES) * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
