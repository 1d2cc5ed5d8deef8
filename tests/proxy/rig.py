"""A proxy with one open session and a plain client on it, over real HTTP without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from tests.fakes import Script, ScriptedSampler, WordRenderer

from pilotage.proxy import ChatCompletionsProxy, Patience
from pilotage.types import SamplingParams, SessionAccess, SessionRecord, SessionSpec

type Body = dict[str, Any]

HASTE = Patience(weights_wait_s=0.05, max_attempts=3, backoff_s=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What a test holds."""

    proxy: ChatCompletionsProxy
    sampler: ScriptedSampler
    renderer: WordRenderer
    access: SessionAccess
    client: httpx.AsyncClient

    async def post(
        self, messages: Sequence[Body], *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Post one request."""
        body = {"model": "policy", "messages": messages, **fields}
        return await self.client.post("/chat/completions", json=body, headers=headers)

    async def ask(self, messages: Sequence[Body], **fields: Any) -> Body:
        """Post one request and return the assistant message as an agent would keep it."""
        answer = await self.post(messages, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def close(self) -> SessionRecord:
        """Close the session."""
        return await self.proxy.close(self.access)


def spec(**fields: Any) -> SessionSpec:
    """Return a spec whose defaults never get in the way."""
    defaults: dict[str, Any] = {"rollout_id": "rollout-1", "sampling": SamplingParams(), "ttl_s": 60.0}
    return SessionSpec(**(defaults | fields))


@contextlib.asynccontextmanager
async def rig(
    *,
    renderer: WordRenderer | None = None,
    script: Sequence[Script] = (),
    sampler: ScriptedSampler | None = None,
    session: SessionSpec | None = None,
    model_name: str = "policy",
    honour_dropped_reasoning: bool = False,
) -> AsyncGenerator[Rig]:
    """Open a proxy with one session."""
    renderer = renderer or WordRenderer()
    sampler = sampler or ScriptedSampler(script=iter(script))
    proxy = ChatCompletionsProxy(
        sampler,
        renderer,
        model_name=model_name,
        patience=HASTE,
        honour_dropped_reasoning=honour_dropped_reasoning,
    )
    access = proxy.open(session or spec())
    async with client_of(proxy, access.api_key) as client:
        yield Rig(proxy=proxy, sampler=sampler, renderer=renderer, access=access, client=client)


def client_of(proxy: ChatCompletionsProxy, key: str) -> httpx.AsyncClient:
    """Return a client that holds `key`."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(proxy.app),
        base_url=proxy.base_url,
        headers={"authorization": f"Bearer {key}"},
    )


class Connection:
    """One HTTP request as the server hands it to the app, over a connection that the test can cut.

    Ten times cheaper than a client, for tests that post by the ten thousand.
    """

    def __init__(
        self,
        proxy: ChatCompletionsProxy,
        key: str,
        body: Body,
        headers: dict[str, str] | None = None,
        *,
        path: str = "/v1/chat/completions",
    ) -> None:
        self.cut = asyncio.Event()
        self.sent: list[MutableMapping[str, Any]] = []
        self._body: bytes | None = orjson.dumps(body)
        self._app = proxy.app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"authorization", b"Bearer " + key.encode()),
                *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
            ],
        }

    async def run(self) -> None:
        """Hand the request over, and wait until the app is done with it."""
        await self._app(self._scope, self._receive, self._send)

    async def answer(self) -> Body:
        """Run, and return the JSON that a 200 carries."""
        await self.run()
        start, *parts = self.sent
        content = b"".join(part.get("body", b"") for part in parts)
        assert start["status"] == 200, content
        return orjson.loads(content)

    async def _receive(self) -> Body:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.cut.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


def system(text: str) -> Body:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Body:
    """Return a user message."""
    return {"role": "user", "content": text}


def tool(call: Body, text: str) -> Body:
    """Return the tool message that answers `call`."""
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def schema(name: str, **properties: Any) -> Body:
    """Return an offered tool."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
