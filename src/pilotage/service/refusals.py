"""An answer that is an error: its body, its HTTP status, and the response that carries it."""

import logging
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from pilotage.errors import (
    ContextExceededError,
    InvalidBodyError,
    PilotageError,
    SamplerError,
    TrainerError,
    WeightsChangingError,
)
from pilotage.wire.core import HTTP_STATUS, ErrorBody, ErrorCode

_LOG = logging.getLogger(__name__)


class Refusal(Exception):
    """A call that is answered with an error."""

    def __init__(
        self, code: ErrorCode | str, message: str, *, status: int | None = None, **details: Any
    ) -> None:
        """Args:
        status: HTTP status of codes that are not `ErrorCode`s.
        details: other fields of `ErrorBody`.
        """
        super().__init__(message)
        self.body = ErrorBody(code=str(code), message=message, **details)
        self.status = status or status_of(self.body)


def status_of(body: ErrorBody) -> int:
    """Return the HTTP status of an error."""
    return HTTP_STATUS[ErrorCode(body.code)] if body.code in ErrorCode else 409


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def error_response(body: ErrorBody, status: int | None = None) -> Response:
    """Return the response of an error; absent fields are left out."""
    content = body.model_dump(exclude_none=True, mode="json")
    headers = {"retry-after": str(max(1, round(body.retry_after_s)))} if body.retry_after_s else None
    return Response(
        orjson.dumps(content),
        status_code=status or status_of(body),
        media_type="application/json",
        headers=headers,
    )


def exception_handlers(who: str) -> dict[type[Exception], ExceptionHandler]:
    """Return what an app needs to answer every error in the one shape.

    Args:
        who: failed, where the error is nobody's refusal.
    """

    async def broken(request: Request, error: Exception) -> Response:
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = ErrorBody(code=ErrorCode.UNAVAILABLE, message=f"{who} failed on this request")
        return error_response(body, 500)

    return {
        Refusal: _refused,
        PilotageError: _failed,
        HTTPException: _no_route,
        ClientDisconnect: _gone,
        Exception: broken,
    }  # pyright: ignore[reportReturnType] - each handler asserts its own error


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error.body, error.status)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PilotageError)
    return error_response(error_body(error))


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a path or method that no route takes."""
    assert isinstance(error, HTTPException)
    body = ErrorBody(code=ErrorCode.NOT_FOUND, message=f"{request.method} of this path: {error.detail}")
    return error_response(body, error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    """Answer whom nobody hears: the client left before its request had arrived."""
    body = ErrorBody(code=ErrorCode.UNAVAILABLE, message="the request did not arrive whole")
    return error_response(body, 400)


def error_body(error: PilotageError) -> ErrorBody:
    """Return the wire's form of an error of the engine."""
    if isinstance(error, ContextExceededError):
        return ErrorBody(code=ErrorCode.CONTEXT_EXCEEDED, message=str(error))
    if isinstance(error, WeightsChangingError):
        return ErrorBody(
            code=ErrorCode.WEIGHTS_CHANGING,
            message=str(error),
            retryable=True,
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, SamplerError):
        return ErrorBody(code=ErrorCode.SAMPLER_ERROR, message=str(error), retryable=error.retryable)
    if isinstance(error, TrainerError):
        return ErrorBody(code=ErrorCode.TRAINER_ERROR, message=str(error))
    path = error.path if isinstance(error, InvalidBodyError) else None
    return ErrorBody(code=ErrorCode.INVALID, message=str(error), path=path or None)


def invalid(error: ValidationError) -> Refusal:
    """Return the refusal of a body that pydantic refused: the first fault, with its path."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key {path}; keys of your own start with x-"
    return Refusal(ErrorCode.INVALID, f"{path}: {message}" if path else message, path=path or None)
