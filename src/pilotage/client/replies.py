"""From an error reply to an exception: flat bodies, `{detail: [...]}`, and JSON nested in texts."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from pilotage.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    JobFailedError,
    NotFoundError,
    RequestFailedError,
    ServiceError,
)
from pilotage.wire.core import ErrorCode

_MAX_DEPTH = 8
_MAX_MESSAGE = 2000

_CLASS_OF_CODE: dict[str, type[ServiceError]] = {
    ErrorCode.UNAUTHENTICATED: AuthError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.CONFLICT: ConflictError,
    ErrorCode.JOB_NOT_RUNNING: ConflictError,
    ErrorCode.CAPACITY: CapacityError,
    ErrorCode.ENGINE_LOST: JobFailedError,
}
_CLASS_OF_STATUS: dict[int, type[ServiceError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
    410: JobFailedError,
}
_FINAL = frozenset(
    {
        ErrorCode.CONTEXT_EXCEEDED,
        ErrorCode.WEIGHTS_CHANGING,
        ErrorCode.SAMPLER_ERROR,
        ErrorCode.TRAINER_ERROR,
        ErrorCode.ENGINE_LOST,
        ErrorCode.CAPACITY,
    }
)
"""Codes of an answer that stands: of an operation's outcome, or of a job that can never be placed."""
_TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})


def error_of(response: httpx.Response, content: bytes, *, call: str) -> ServiceError:
    """Return the exception that stands for an error reply.

    Args:
        call: method and path, for the message.
    """
    body = _error_body(content)
    code = body.get("code")
    code = str(code) if isinstance(code, str | int) else None
    if response.status_code == 429 and code != ErrorCode.CAPACITY:
        found: type[ServiceError] = CapacityError if "cap" in str(body).lower() else RequestFailedError
    else:
        found = _CLASS_OF_CODE.get(code or "") or _CLASS_OF_STATUS.get(
            response.status_code, RequestFailedError
        )
    error = found(_message(response, body, content, call=call))
    error.code, error.status = code, response.status_code
    error.retry_after_s = _retry_after(response, body)
    tail = body.get("log_tail")
    error.log_tail = tuple(str(line) for line in tail) if isinstance(tail, list) else ()
    return error


def may_repeat(response: httpx.Response, content: bytes) -> bool:
    """Return whether the same call, sent again as it is, may succeed."""
    body = _error_body(content)
    if body.get("code") in _FINAL:
        return False
    retryable = body.get("retryable")
    if isinstance(retryable, bool):
        return retryable
    return response.status_code in _TRANSIENT_STATUSES


def _retry_after(response: httpx.Response, body: dict[str, Any]) -> float | None:
    for value in (body.get("retry_after_s"), response.headers.get("retry-after")):
        try:
            seconds = float(value)  # pyright: ignore[reportArgumentType]  # None and dates are caught
        except (TypeError, ValueError):
            continue
        if 0 <= seconds < 3600:
            return seconds
    return None


def _error_body(content: bytes) -> dict[str, Any]:
    """Return the innermost object with a `code`, or else the first with a message or detail, or else {}."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    found = list(_objects(parsed, 0))
    for wanted in ("code", "message", "detail"):
        holders = [body for body in found if body.get(wanted) is not None]
        if holders:
            return holders[-1]
    return {}


def _objects(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from _objects(child, depth + 1)
    elif isinstance(value, list):
        for child in value:
            yield from _objects(child, depth + 1)
    elif isinstance(value, str) and "{" in value:
        try:
            inner, _ = json.JSONDecoder().raw_decode(value[value.index("{") :])
        except (ValueError, RecursionError):
            return
        yield from _objects(inner, depth + 1)


def _message(response: httpx.Response, body: dict[str, Any], content: bytes, *, call: str) -> str:
    """Return one line: what the service says, where, and which call it was."""
    detail = body.get("detail")
    if isinstance(body.get("message"), str):
        said = body["message"]
    elif isinstance(detail, list) and detail and isinstance(detail[0], dict):
        said = "; ".join(f"{_where(item.get('loc'))}{item.get('msg', '')}" for item in detail)
    elif isinstance(detail, str):
        said = detail
    else:
        said = content.decode("utf-8", "replace").strip() or response.reason_phrase
    path = f"{body['path']}: " if isinstance(body.get("path"), str) and body["path"] else ""
    request_id = response.headers.get("x-snowflake-request-id")
    suffix = f", request {request_id}" if request_id else ""
    line = " ".join(f"{path}{said}".split())[:_MAX_MESSAGE]
    return f"{line} ({call}: HTTP {response.status_code}{suffix})"


def _where(location: Any) -> str:
    if not isinstance(location, list):
        return ""
    return ".".join(str(part) for part in location if part != "body") + ": "
