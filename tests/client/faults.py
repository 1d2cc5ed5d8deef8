"""A transport with faults between a client and an app in this process."""

import asyncio
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import override

import httpx


class Fault(StrEnum):
    """What becomes of one exchange."""

    NONE = "none"
    UNREACHABLE = "unreachable"
    """The connection is never opened."""
    LOST_REQUEST = "lost request"
    """The connection breaks before the server has the request."""
    LOST_REPLY = "lost reply"
    """The server acts; the connection breaks before its reply."""
    TRUNCATED = "truncated"
    """The server acts; half of its reply arrives."""
    GARBLED = "garbled"
    """The server acts; half of its reply arrives, with a length that says it is all."""
    TWICE = "twice"
    """The server gets the request two times; the second reply arrives."""
    LATE = "late"
    """The reply of an earlier attempt is lost, and the request arrives again later, on its own."""
    BUSY = "busy"
    """Something before the server answers 503."""


class FaultyTransport(httpx.AsyncBaseTransport):
    """Passes requests to an app, spoiling them in turn.

    `calls` lists method and path of what arrived here; `faults` are used up one a request, those of paths
    that `spares` names excepted, and no fault follows the last.
    """

    def __init__(
        self,
        app: object,
        faults: Iterable[Fault] = (),
        *,
        spares: Callable[[httpx.Request], bool] = lambda request: False,
    ) -> None:
        self._inner = httpx.ASGITransport(app, raise_app_exceptions=False)  # pyright: ignore
        self._faults = iter(faults)
        self._spares = spares
        self._late: list[httpx.Request] = []
        self.calls: list[str] = []
        self.requests: list[httpx.Request] = []

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        self.calls.append(f"{request.method} {request.url.path}")
        self.requests.append(request)
        for late in self._late:
            await self._pass(late)
        self._late.clear()
        fault = Fault.NONE if self._spares(request) else next(self._faults, Fault.NONE)
        copy = httpx.Request(request.method, request.url, headers=request.headers, content=content)
        return await self._spoiled(copy, fault)

    async def _spoiled(self, request: httpx.Request, fault: Fault) -> httpx.Response:
        match fault:
            case Fault.UNREACHABLE:
                raise httpx.ConnectError("connection refused")
            case Fault.LOST_REQUEST:
                raise httpx.WriteError("broken pipe")
            case Fault.BUSY:
                return _reply(httpx.Response(503), b"<html>try again</html>", stated=22)
            case Fault.LATE:
                self._late.append(request)
                raise httpx.ReadTimeout("nothing came back")
            case Fault.TWICE:
                await self._pass(request)
            case _:
                pass
        response = await self._pass(request)
        whole = response.content
        match fault:
            case Fault.LOST_REPLY:
                raise httpx.ReadError("connection reset")
            case Fault.TRUNCATED:
                return _reply(response, whole[: len(whole) // 2], stated=len(whole))
            case Fault.GARBLED:
                return _reply(response, whole[: len(whole) // 2], stated=len(whole) // 2)
            case _:
                return _reply(response, whole, stated=len(whole))

    async def _pass(self, request: httpx.Request) -> httpx.Response:
        copy = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
        response = await self._inner.handle_async_request(copy)
        await response.aread()
        return response


def _reply(response: httpx.Response, content: bytes, *, stated: int) -> httpx.Response:
    headers = {**response.headers, "content-length": str(stated)}
    return httpx.Response(response.status_code, headers=headers, stream=_Bytes(content))


class _Bytes(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    @override
    async def __aiter__(self):  # pyright: ignore
        await asyncio.sleep(0)
        yield self._content
