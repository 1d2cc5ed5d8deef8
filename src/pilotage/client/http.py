"""The one way to the service: HTTP with TLS, one retry policy, errors as exceptions, the token never shown.

A call says whether repeating it is safe. One that is not is repeated only where the connection was never
opened; for it a reply that is lost is a `LostReplyError`, which the caller must resolve by other means. A
reply that is cut off or cannot be read counts as lost.
"""

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from pilotage import __version__
from pilotage.client.connection import Connection
from pilotage.client.replies import error_of, may_repeat
from pilotage.errors import ConfigError, LostReplyError, RequestFailedError, ServiceError
from pilotage.wire.core import OCTET_STREAM

_log = logging.getLogger(__name__)

JSON = "application/json"
_CREDENTIALS = ("Authorization", "X-Snowflake-Authorization-Token-Type")
_TOKEN_TYPE = "PROGRAMMATIC_ACCESS_TOKEN"  # a value of the wire, not a secret
_NEVER_OPENED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_MAX_UNREADABLE = 5
"""Replies of one call that may be unreadable before the server, not the network, is held to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call that may be repeated is repeated."""

    total_s: float = 300.0
    first_s: float = 0.1
    """Wait before the first repetition; it doubles, and a random half of it is left out."""
    longest_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, relative to the service's prefix."""

    method: str
    path: str = ""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    content: bytes = b""
    content_type: str = JSON
    is_repeatable: bool = False
    """Whether the service does it once however often it arrives."""
    timeout_s: float = 60.0
    """Longest silence while the reply is waited for or read."""
    patience: Patience | None = None
    """None is the transport's."""

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.method} {self.path or '/'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply that is no error, read whole."""

    status: int
    content: bytes
    content_type: str

    def json(self) -> Any:
        """Return the body; an empty one is {}.

        Raises:
            ValueError: it is not JSON.
        """
        return orjson.loads(self.content) if self.content.strip() else {}


class Http:
    """Calls to one service. An async context manager; at its end all connections are closed."""

    def __init__(
        self,
        connection: Connection,
        *,
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        max_reply_bytes: int = 256 * 2**20,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            transport: instead of a network, for a service in this process.
            max_reply_bytes: a longer reply is an error, not memory.
        """
        self.connection = connection
        self._patience = patience or Patience()
        self._max_reply_bytes = max_reply_bytes
        headers = {"User-Agent": f"pilotage/{__version__}", "Accept-Encoding": "identity"}
        if connection.token is not None:
            headers |= zip(_CREDENTIALS, (f"Bearer {connection.token.reveal()}", _TOKEN_TYPE), strict=True)
        self._client = httpx.AsyncClient(
            base_url=connection.origin,
            headers=headers,
            transport=transport,
            verify=_tls(connection),
            trust_env=not connection.is_loopback,  # a proxy's settings are for other machines
            follow_redirects=False,
            limits=httpx.Limits(max_connections=1024, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def call[T](self, call: Call, decode: Callable[[Reply], T]) -> T:
        """Send a call until it has a reply, and return what `decode` makes of it.

        Args:
            decode: raises ValueError (a WireError is one) for a reply that it cannot read.

        Raises:
            ServiceError: the service refused it, it failed, or nothing came back in time.
        """
        patience = call.patience or self._patience
        deadline, pause_s, unreadable = time.monotonic() + patience.total_s, patience.first_s, 0
        while True:
            error, repeats = await self._attempt(call, decode)
            if not isinstance(error, ServiceError):
                return error
            unreadable += isinstance(error.__cause__, ValueError)
            wait_s = error.retry_after_s or pause_s * random.uniform(0.5, 1)
            if not repeats or time.monotonic() + wait_s > deadline or unreadable >= _MAX_UNREADABLE:
                raise error
            _log.info("repeating %s in %.1f s: %s", call.name, wait_s, error)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, patience.longest_s)

    @contextlib.asynccontextmanager
    async def stream(self, url: str) -> AsyncGenerator[httpx.Response]:
        """GET a URL that the service gave, read as it arrives, once. Elsewhere the token is not sent.

        Raises:
            httpx.TransportError: no reply, or not all of it.
        """
        origin = httpx.URL(self.connection.origin)
        target = origin.join(url)
        is_ours = (target.scheme, target.host, target.port) == (origin.scheme, origin.host, origin.port)
        request = self._client.build_request("GET", target, timeout=httpx.Timeout(60.0, connect=10.0))
        for name in () if is_ours else _CREDENTIALS:
            request.headers.pop(name, None)
        response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    async def _attempt[T](self, call: Call, decode: Callable[[Reply], T]) -> tuple[T | ServiceError, bool]:
        """Send once; return the result, or the error and whether the call may be sent again."""
        try:
            response, content = await self._send(call)
        except httpx.TransportError as error:
            never_opened = isinstance(error, _NEVER_OPENED)
            kind = RequestFailedError if never_opened else LostReplyError
            failed = kind(
                self._redact(f"no reply to {call.name} from {self.connection.origin}: {_said(error)}")
            )
            failed.__cause__ = error
            return failed, never_opened or call.is_repeatable
        if response.status_code >= 300:
            refused = error_of(response, content, call=call.name)
            refused.args = (self._redact(str(refused)),)
            return refused, call.is_repeatable and may_repeat(response, content)
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        try:
            return decode(Reply(status=response.status_code, content=content, content_type=kind)), False
        except ValueError as error:
            lost = LostReplyError(
                self._redact(f"the reply to {call.name} cannot be read: {_first_line(error)}")
            )
            lost.__cause__ = error
            return lost, call.is_repeatable

    async def _send(self, call: Call) -> tuple[httpx.Response, bytes]:
        headers = {"Content-Type": call.content_type} if call.content else {}
        request = self._client.build_request(
            call.method,
            self.connection.prefix + call.path,
            params=dict(call.query) or None,
            content=call.content,
            headers=headers,
            timeout=httpx.Timeout(call.timeout_s, connect=10.0),
        )
        response = await self._client.send(request, stream=True)
        try:
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > self._max_reply_bytes:
                    raise RequestFailedError(
                        f"the reply to {call.name} is over {self._max_reply_bytes} bytes; ask for less"
                    )
        finally:
            await response.aclose()
        stated = response.headers.get("content-length")
        if stated is not None and stated.isdigit() and int(stated) != len(content):
            raise httpx.RemoteProtocolError(f"{len(content)} of {stated} bytes arrived")
        return response, bytes(content)

    def _redact(self, text: str) -> str:
        return self.connection.redact(text)


def json_call(method: str, path: str, body: object, **options: Any) -> Call:
    """Build a call with a JSON body."""
    return Call(method=method, path=path, content=orjson.dumps(body), **options)


def frame_call(path: str, frame: bytes, **options: Any) -> Call:
    """Build a POST of a DSSST1 frame."""
    return Call(method="POST", path=path, content=frame, content_type=OCTET_STREAM, **options)


def _tls(connection: Connection) -> ssl.SSLContext:
    """Return a context that verifies: by the system's CAs, or by the given one alone."""
    try:
        return ssl.create_default_context(cafile=connection.ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"ca_file {connection.ca_file} holds no certificate: {error.reason}") from None


def _said(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
