"""The short way to the endpoint is LiteLLM's: same request, same reply, same exceptions."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pilotage.rollouts.third_party import prepare

pytestmark = pytest.mark.agents
prepare()  # before any test imports the SDK: LiteLLM's look-ups stay off the network

_CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
_TOO_LONG = "This model's maximum context length is 10 tokens. However, you requested 20 tokens"


def completion(**message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """Answers every request alike, and keeps what it was sent."""

    status: int
    body: str
    """Empty where it hangs up instead."""
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    clients: list[str] = field(default_factory=list[str])
    """What each request said sent it."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                request = json.loads(await reader.readexactly(int(headers["content-length"])))
                kept = ("authorization", "content-type", "x-litellm-session-id")
                self.requests.append(request | {name: headers.get(name) for name in kept})
                self.clients.append(headers["user-agent"])
                if not self.body:
                    break
                payload = self.body.encode()
                kind = "application/json" if payload[:1] == b"{" else "text/plain"
                writer.write(
                    f"HTTP/1.1 {self.status} Any\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(payload)}\r\n\r\n".encode()
                    + payload
                )
        writer.close()


@contextlib.asynccontextmanager
async def endpoint(status: int, body: str) -> AsyncGenerator[Endpoint]:
    served = Endpoint(status=status, body=body)
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()  # no waiting: LiteLLM keeps its connections


async def ask(
    served: Endpoint, *, is_direct: bool, model: str = "openai/policy", top_p: float | None = None
) -> tuple[Any, ...]:
    """Make one call; returns the SDK's message and the request, or the exception's kind, text and cause."""
    from openhands.sdk.llm import Message, TextContent
    from openhands.sdk.llm.call_context import LLMCallContext
    from openhands.sdk.tool.builtins import FinishTool
    from pydantic import SecretStr

    from pilotage.rollouts.policy_llm import PolicyLLM, open_client

    llm = PolicyLLM(
        model=model,
        top_p=top_p,
        base_url=f"http://127.0.0.1:{served.port}/v1",
        api_key=SecretStr("sk-a-long-key"),
        num_retries=1,
        reasoning_effort=None,
        capability_overrides={"supports_reasoning_effort": False, "supports_sampling_params": True},
        timeout=30,
        input_cost_per_token=0.0,
        output_cost_per_token=0.0,
    )
    served.requests.clear()
    messages = [
        Message(role="system", content=[TextContent(text="caf\u00e9")]),
        Message(role="user", content=[TextContent(text="hi")]),
    ]
    async with open_client() as client:
        if is_direct:
            llm.call_through(client)
        try:
            response = await llm.acompletion(
                messages,
                tools=FinishTool.create(),
                call_context=LLMCallContext(prompt_cache_key="key", session_id="session"),
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, it is compared
            return type(error), str(error), type(error.__cause__), served.requests
    usage = llm.metrics.token_usages
    return response.message.model_dump(), [use.model_dump() for use in usage], served.requests


@pytest.mark.parametrize(
    "body",
    [
        completion(content=None, tool_calls=[_CALL]),
        completion(content=None, tool_calls=[_CALL, {**_CALL, "id": "c2"}]),
        completion(content="plain"),
        completion(content="<think>why</think>therefore"),
        completion(content="therefore", reasoning_content="why"),
        completion(content=""),
    ],
)
async def test_requests_and_replies_are_those_of_litellm(body: dict[str, Any]) -> None:
    async with endpoint(200, json.dumps(body)) as served:
        through_litellm = await ask(served, is_direct=False)
        direct = await ask(served, is_direct=True)

    assert direct == through_litellm
    assert [client.partition("/")[0] for client in served.clients] == ["asyncopenai", "python-httpx"]
    [request] = direct[2]
    assert request["model"] == "policy"
    assert request["x-litellm-session-id"] == "session"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, json.dumps({"error": {"message": "no", "code": 500}})),
        (400, json.dumps({"error": {"message": _TOO_LONG, "code": "context_length_exceeded"}})),
        (400, json.dumps({"error": {"message": "bad", "type": "invalid_request_error"}})),
        (400, "plain words"),
        (401, json.dumps({"error": {"message": "unknown key"}})),
        (404, json.dumps({"error": {"message": "no"}})),
        (408, json.dumps({"error": {"message": "slow"}})),
        (422, json.dumps({"error": {"message": "no"}})),
        (429, json.dumps({"error": {"message": "wait"}})),
        (500, json.dumps({"error": {"message": "oops"}})),
        (502, "bad gateway"),
        (503, json.dumps({"error": {"message": "busy"}})),
        (200, ""),
    ],
)
async def test_failures_are_those_of_litellm(status: int, body: str) -> None:
    async with endpoint(status, body) as served:
        through_litellm = await ask(served, is_direct=False)
        direct = await ask(served, is_direct=True)

    assert direct == through_litellm
    assert issubclass(direct[0], Exception)


@pytest.mark.parametrize("body", ["no JSON", "{}", json.dumps({**completion(content="x"), "choices": []})])
async def test_a_reply_that_is_no_completion_is_tried_again_as_through_litellm(body: str) -> None:
    async with endpoint(200, body) as served:
        through_litellm = await ask(served, is_direct=False)
        direct = await ask(served, is_direct=True)

    assert direct[0] is through_litellm[0]  # the kind decides about the retry; the text says more than theirs


@pytest.mark.parametrize("other", [{"model": "deepseek/policy"}, {"top_p": 0.5}])
async def test_another_provider_or_parameter_goes_through_litellm(other: dict[str, Any]) -> None:
    async with endpoint(200, json.dumps(completion(content="plain"))) as served:
        reply = await ask(served, is_direct=True, **other)

    assert reply[0]["content"][0]["text"] == "plain"
    assert len(served.clients) == 1
    assert not served.clients[0].startswith("python-httpx")
