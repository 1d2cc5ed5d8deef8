"""Polling on the stock wire: the three encodings of a result, and the events of a stream.

Events of a stream are kept as long as the request. A poll without a cursor continues where the last such
poll ended, as stock clients expect; a poll with one reads from there, so that a lost reply loses nothing.
"""

import base64
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson

from pilotage.service.bodies import whole_number
from pilotage.service.operations import Operation
from pilotage.wire.chunks import ChunkKind, split_frame
from pilotage.wire.core import rfc3339

_STATUS = {"waiting": "pending", "running": "running", "done": "completed", "failed": "failed",
           "cancelled": "cancelled"}  # fmt: skip
_MAX_BASE64_BYTES = 2**18
"""Larger frames go in chunks ..."""
_CHUNK_BYTES = 4 * 2**20
"""... of so many bytes, one a poll."""
_DEFAULT_EVENTS, _MAX_EVENTS = 16, 512


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """Events of one streaming request."""

    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    delivered: int = 0
    """Events that polls without a cursor have had."""


def describe(
    operation: Operation, stream: Stream | None, *, max_events: str | None, cursor: str | None
) -> Any:
    """Return the reply to one poll.

    Raises:
        Refusal: `max_events` or `cursor` is no number that can be.
    """
    ended_at = operation.ended_at or operation.created_at
    status = _STATUS[operation.status]
    if stream is not None and operation.status == "running":
        status = "streaming"
    reply: dict[str, Any] = {
        "request_id": operation.id,
        "status": status,
        "created_at": rfc3339(operation.created_at),
        "updated_at": rfc3339(ended_at),
    }
    if operation.error is not None:
        reply["error"] = operation.error.model_dump(mode="json", exclude_none=True)
    if stream is not None:
        return reply | _stream_page(stream, _count(max_events), _position(cursor))
    if operation.reply is not None:
        return reply | _result(operation, _position(cursor) or 0)
    return reply


def _result(operation: Operation, position: int) -> dict[str, Any]:
    assert operation.reply is not None
    content = operation.reply.content
    if not operation.reply.is_frame:
        return {"result": orjson.loads(content)}
    if len(content) <= _MAX_BASE64_BYTES:
        payload = base64.b64encode(content).decode()
        envelope = {"content_type": "application/octet-stream", "encoding": "base64", "wire_format": "DSSST1"}
        return {"result": envelope | {"payload_b64": payload}}
    chunks = split_frame(content, kind=ChunkKind.RESULT, max_bytes=_CHUNK_BYTES)
    if position >= len(chunks):
        return {"events": []}
    chunk = chunks[position]
    event = {
        "type": "result_chunk",
        "payload_b64": base64.b64encode(chunk).decode(),
        "payload_sha256": sha256(chunk).hexdigest(),
    }
    following = position + 1
    return {"events": [event]} | ({"next_cursor": str(following)} if following < len(chunks) else {})


def _stream_page(stream: Stream, count: int, position: int | None) -> dict[str, Any]:
    start = stream.delivered if position is None else position
    page = stream.events[start : start + count]
    if position is None:
        stream.delivered = start + len(page)
    has_more = start + len(page) < len(stream.events)
    next_cursor = {"next_cursor": str(start + len(page))} if position is not None and has_more else {}
    return {"events": page} | next_cursor


def _count(text: str | None) -> int:
    if text is None:
        return _DEFAULT_EVENTS
    return max(1, min(whole_number(text, 0), _MAX_EVENTS))


def _position(text: str | None) -> int | None:
    return whole_number(text, 0) if text else None
