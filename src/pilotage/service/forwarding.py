"""Bytes between a client and a job's engine: bounded, streamed, never parsed."""

from collections.abc import AsyncIterator, Mapping

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pilotage.service.engines import Engine
from pilotage.service.refusals import Refusal
from pilotage.wire.core import ErrorCode

MAX_REQUEST_BYTES = 60 * 2**20
MAX_RESPONSE_BYTES = 128 * 2**20
_SMALL_BYTES = 2**20
_PASSED_BACK = ("content-type", "retry-after", "server-timing")


async def read_bounded(request: Request, limit: int = MAX_REQUEST_BYTES) -> bytes:
    """Return a request's body.

    Raises:
        Refusal: it is larger than `limit`; what is over it is not read.
    """
    return b"".join([piece async for piece in _bounded(request, limit)])


async def forward(
    request: Request, engine: Engine, path: str, *, body: bytes | None = None, headers: Mapping[str, str]
) -> Response:
    """Send a request on to the engine and its reply back.

    Args:
        body: what was read of it already; None streams it.
        headers: of the service's own; the client's are not passed on.

    Raises:
        Refusal: the body is too large, or the engine does not answer.
    """
    content: bytes | AsyncIterator[bytes] | None = body
    if body is None and request.method == "POST":
        length = request.headers.get("content-length", "")
        small = _is_number(length) and int(length) <= _SMALL_BYTES
        content = await read_bounded(request) if small else _bounded(request, MAX_REQUEST_BYTES)
    outgoing = engine.http.build_request(
        request.method, path, params=request.url.query or None, content=content, headers=dict(headers)
    )
    try:
        reply = await engine.http.send(outgoing, stream=True)
        passed = {name: reply.headers[name] for name in _PASSED_BACK if name in reply.headers}
        if int(reply.headers.get("content-length", _SMALL_BYTES + 1)) <= _SMALL_BYTES:
            content_back = await reply.aread()
            await reply.aclose()
            return Response(content_back, reply.status_code, headers=passed)
    except httpx.HTTPError as error:
        raise Refusal(
            ErrorCode.UNAVAILABLE,
            f"the job's engine does not answer ({type(error).__name__}); ask again, or get the job",
            retryable=True,
            retry_after_s=1.0,
        ) from None
    background = BackgroundTask(reply.aclose)
    return StreamingResponse(reply.aiter_raw(), reply.status_code, headers=passed, background=background)


async def _bounded(request: Request, limit: int) -> AsyncIterator[bytes]:
    too_large = Refusal(
        ErrorCode.TOO_LARGE, f"a request has at most {limit} bytes; send it in pieces", path="body"
    )
    length = request.headers.get("content-length", "")
    if _is_number(length) and int(length) > limit:
        raise too_large
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large
        yield piece


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20
