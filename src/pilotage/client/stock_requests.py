"""Requests of the stock wire: submitted, then polled until there is a result, in any of its encodings."""

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from pilotage.client.http import Call, Http, Reply, frame_call
from pilotage.client.paths import segment
from pilotage.errors import RequestFailedError, ServiceError, WaitTimeoutError, WireError
from pilotage.wire.chunks import ChunkKind, join_chunks, split_frame
from pilotage.wire.frames import decode_frame

_POLL_FIRST_S, _POLL_FACTOR, _POLL_LONGEST_S = 0.5, 1.25, 6.0
_DONE = frozenset({"done", "completed", "succeeded"})
_ENDED_BADLY = frozenset({"failed", "cancelled", "canceled"})
_RESTART = "chunk_group_restart_required"


class StockRequests:
    """The asynchronous calls of one job."""

    def __init__(self, http: Http, job_id: str, *, timeout_s: float) -> None:
        """Args:
        timeout_s: longest that one request may take.
        """
        self._http = http
        self._path = f"/{segment(job_id)}"
        self._timeout_s = timeout_s

    async def submit(self, call: Call) -> str:
        """Send a call relative to the job; returns the id of the request."""
        return await self._http.call(replace(call, path=self._path + call.path), _request_id)

    async def submit_group(self, path: str, frame: bytes, *, operation: str) -> str:
        """Send a frame as one chunk group, which the server carries out at most once.

        A server that lost the first chunks is sent all of them again, once, the same bytes.
        """
        chunks = split_frame(frame, kind=ChunkKind.REQUEST, operation=operation, force=True)
        try:
            return await self._send_all(path, chunks)
        except ServiceError as error:
            if error.code != _RESTART:
                raise
        return await self._send_all(path, chunks)

    async def _send_all(self, path: str, chunks: list[bytes]) -> str:
        for chunk in chunks[:-1]:
            call = frame_call(self._path + path, chunk, is_repeatable=True, timeout_s=600.0)
            await self._http.call(call, lambda reply: None)
        call = frame_call(self._path + path, chunks[-1], is_repeatable=True, timeout_s=600.0)
        return await self._http.call(call, _request_id)

    async def result(self, request_id: str) -> Mapping[str, Any]:
        """Poll until a request has its result.

        Raises:
            RequestFailedError: it failed or was cancelled.
            WaitTimeoutError: it has no result in time.
        """
        deadline, pause_s = time.monotonic() + self._timeout_s, _POLL_FIRST_S
        chunks: list[bytes] = []
        cursor = ""
        while True:
            query = {"cursor": cursor} if cursor else {}
            path = f"{self._path}/requests/{segment(request_id)}"
            call = Call(method="GET", path=path, query=query, is_repeatable=True)
            state = await self._http.call(call, _poll_reply)
            chunks += _result_chunks(state)
            cursor = str(state.get("next_cursor") or "")
            if cursor:
                continue  # more of the result is there: no wait
            status = str(state.get("status", "")).lower().removeprefix("request_state_")
            if status in _DONE:
                return _readable(request_id, state, chunks)
            if status in _ENDED_BADLY:
                raise _failure(request_id, status, state.get("error"))
            if time.monotonic() + pause_s > deadline:
                raise WaitTimeoutError(f"request {request_id} was {status} after {self._timeout_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_FACTOR, _POLL_LONGEST_S)


def _request_id(reply: Reply) -> str:
    request_id = reply.json().get("request_id")
    if not isinstance(request_id, str) or not request_id:
        raise ValueError("it has no request_id")
    return request_id


def _poll_reply(reply: Reply) -> dict[str, Any]:
    body = reply.json()
    if not isinstance(body, dict) or "status" not in body:
        raise ValueError("it has no status")
    _result_chunks(body)  # a chunk that was damaged under way is asked for again
    return body


def _result_chunks(state: Mapping[str, Any]) -> list[bytes]:
    found: list[bytes] = []
    for event in state.get("events") or []:
        if event.get("type") != "result_chunk":
            continue
        payload = base64.b64decode(event["payload_b64"], validate=True)
        stated = event.get("payload_sha256")
        if stated and sha256(payload).hexdigest() != stated:
            raise ValueError("a result chunk has another digest than stated")
        found.append(payload)
    return found


def _readable(request_id: str, state: Mapping[str, Any], chunks: list[bytes]) -> Mapping[str, Any]:
    try:
        return _decoded(state, chunks)
    except ValueError as error:
        raise RequestFailedError(f"the result of request {request_id} cannot be read: {error}") from error


def _decoded(state: Mapping[str, Any], chunks: list[bytes]) -> Mapping[str, Any]:
    """Return the result: JSON, a frame in base64, or a frame in chunks."""
    result = state.get("result") or {}
    if chunks:
        tree: Any = decode_frame(join_chunks(chunks, ChunkKind.RESULT))
    elif isinstance(result, dict) and "payload_b64" in result:
        tree = decode_frame(base64.b64decode(result["payload_b64"], validate=True))
        extra = result.get("metrics")
        if isinstance(tree, dict) and isinstance(extra, dict):
            tree = tree | {"metrics": {**tree.get("metrics", {}), **extra}}
    else:
        tree = result
    if not isinstance(tree, dict):
        raise WireError(f"a result is an object, got {type(tree).__name__}")
    return tree


def _failure(request_id: str, status: str, error: Any) -> RequestFailedError:
    detail: Mapping[str, Any] = error if isinstance(error, dict) else {"message": error}
    said = " ".join(str(detail.get("message") or "no reason given").split())[:2000]
    failed = RequestFailedError(f"request {request_id} {status}: {said}")
    code = detail.get("code")
    failed.code = None if code is None else str(code)
    return failed
