"""What is repeated and what is not, what an error says, and what it never says."""

import logging
from collections.abc import Awaitable, Callable

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tests.client.faults import Fault, FaultyTransport

from pilotage.client import Connection, Http, Patience, Secret
from pilotage.client.http import Call
from pilotage.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    JobFailedError,
    LostReplyError,
    NotFoundError,
    RequestFailedError,
    ServiceError,
)

TOKEN = "tok-0123456789"
FAST = Patience(total_s=2.0, first_s=0.001, longest_s=0.002)
GET = Call(method="GET", path="/x", is_repeatable=True)
POST = Call(method="POST", path="/x", content=b"{}")


def app(answer: Callable[[Request], Awaitable[Response]]) -> Starlette:
    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


def answering(status: int, content: bytes, **headers: str) -> Starlette:
    async def answer(request: Request) -> Response:
        return Response(content, status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return app(answer)


async def outcome(
    application: Starlette, call: Call, *faults: Fault, token: Secret | None = None
) -> tuple[object, int]:
    """Make one call; returns its JSON or its error, and how many requests arrived."""
    transport = FaultyTransport(application, faults)
    connection = Connection(origin="http://127.0.0.1:1", token=token)
    async with Http(connection, patience=FAST, transport=transport) as http:
        try:
            return await http.call(call, lambda reply: reply.json()), len(transport.calls)
        except ServiceError as error:
            return error, len(transport.calls)


FINE = answering(200, b'{"ok": true}')
LOST = [Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.TRUNCATED, Fault.GARBLED, Fault.BUSY]


@pytest.mark.parametrize("fault", [*LOST, Fault.UNREACHABLE])
async def test_a_repeatable_call_is_repeated_until_it_has_its_reply(fault: Fault) -> None:
    assert await outcome(FINE, GET, fault, fault) == ({"ok": True}, 3)


@pytest.mark.parametrize("fault", LOST)
async def test_another_call_is_sent_once(fault: Fault) -> None:
    error, arrived = await outcome(FINE, POST, fault)
    assert arrived == 1
    assert isinstance(error, RequestFailedError)
    assert isinstance(error, LostReplyError) is (fault is not Fault.BUSY)


async def test_another_call_is_repeated_where_the_connection_was_never_opened() -> None:
    assert await outcome(FINE, POST, Fault.UNREACHABLE, Fault.UNREACHABLE) == ({"ok": True}, 3)


async def test_a_reply_that_stays_unreadable_is_the_servers_fault() -> None:
    error, arrived = await outcome(answering(200, b"<html>"), GET)
    assert arrived == 5
    assert isinstance(error, LostReplyError)
    assert "the reply to GET /x cannot be read" in str(error)


@pytest.mark.parametrize(
    ("status", "body", "error", "code"),
    [
        (401, {"code": "unauthenticated", "message": "give a valid token"}, AuthError, 3),
        (403, {"message": "not yours"}, AuthError, 3),
        (404, {"code": "not_found", "message": "no job j"}, NotFoundError, 4),
        (429, {"code": "capacity", "message": "9 of 8 GPUs"}, CapacityError, 5),
        (410, {"code": "engine_lost", "message": "it died"}, JobFailedError, 6),
        (422, {"code": "invalid", "message": "unknown key", "path": "a.0.b"}, RequestFailedError, 7),
        (500, {"code": "unavailable", "message": "failed"}, RequestFailedError, 7),
        (409, {"code": "conflict", "message": "the job has ended"}, ConflictError, 9),
    ],
)
async def test_an_error_has_its_class_and_exit_code(
    status: int, body: dict[str, object], error: type[ServiceError], code: int
) -> None:
    found, arrived = await outcome(answering(status, orjson.dumps(body)), GET)
    assert type(found) is error
    assert isinstance(found, ServiceError)
    assert (found.exit_code, found.status, found.code) == (code, status, body.get("code"))
    assert str(body["message"]) in str(found)
    assert f"(GET /x: HTTP {status})" in str(found)
    assert arrived == 1
    if "path" in body:
        assert str(found).startswith("a.0.b: ")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"detail": [{"loc": ["body", "lr"], "msg": "must be positive", "type": "v"}]},
            "lr: must be positive",
        ),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": 'upstream: {"code": "x", "message": "the inner one"}'}, "the inner one"),
        ({"error": {"detail": '{"message": "{\\"code\\": 7, \\"message\\": \\"deepest\\"}"}'}}, "deepest"),
        ([1, 2], "[1,2]"),
    ],
)
async def test_a_message_is_found_wherever_it_is(body: object, says: str) -> None:
    error, _ = await outcome(answering(400, orjson.dumps(body)), GET)
    assert str(error).startswith(says)


async def test_an_error_that_is_no_json_is_shown_in_one_short_line() -> None:
    error, _ = await outcome(answering(400, b"bad\n" * 5000), GET)
    assert "\n" not in str(error)
    assert len(str(error)) < 2100


async def test_the_snowflake_request_id_is_told() -> None:
    error, _ = await outcome(answering(400, b"{}", x_snowflake_request_id="01b-77"), GET)
    assert "request 01b-77" in str(error)


async def test_an_outcome_of_the_engine_is_never_asked_for_again() -> None:
    body = {"code": "weights_changing", "message": "wait", "retryable": True, "retry_after_s": 2.5}
    error, arrived = await outcome(answering(503, orjson.dumps(body)), GET)
    assert arrived == 1
    assert isinstance(error, ServiceError)
    assert error.retry_after_s == 2.5


async def test_the_server_may_say_when_to_come_back() -> None:
    times = iter([429, 200])

    async def answer(request: Request) -> Response:
        status = next(times)
        return JSONResponse({"message": "slow down"}, status, headers={"retry-after": "0.01"})

    assert await outcome(app(answer), GET) == ({"message": "slow down"}, 2)


async def test_a_reply_over_the_bound_is_an_error_and_not_memory() -> None:
    transport = httpx.ASGITransport(answering(200, b"x" * 5000))
    connection = Connection(origin="http://127.0.0.1:1")
    async with Http(connection, transport=transport, max_reply_bytes=1000) as http:
        with pytest.raises(RequestFailedError, match="is over 1000 bytes; ask for less"):
            await http.call(GET, lambda reply: reply.content)


async def test_the_token_goes_into_two_headers_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    async def echo(request: Request) -> Response:
        return PlainTextResponse(f"refused {request.headers['authorization']}", 400)

    with caplog.at_level(logging.DEBUG):
        error, _ = await outcome(app(echo), GET, Fault.BUSY, token=Secret(TOKEN))
    assert str(error).startswith("refused Bearer ***")
    assert TOKEN not in f"{error!r} {caplog.text}"


async def test_without_a_token_no_credentials_are_sent() -> None:
    async def echo(request: Request) -> Response:
        return JSONResponse(dict(request.headers))

    headers, _ = await outcome(app(echo), GET)
    assert isinstance(headers, dict)
    assert not {"authorization", "x-snowflake-authorization-token-type"} & set(headers)


async def test_a_redirect_is_not_followed() -> None:
    error, arrived = await outcome(answering(307, b"", location="https://elsewhere.example/"), GET)
    assert arrived == 1
    assert isinstance(error, RequestFailedError)
