"""What the proxy adds to a turn, with a sampler that answers at once.

Each turn re-sends the whole conversation, as agents do, and adds one reply and one tool result; the size
is that of the prompt. `app` calls the ASGI app in this process, without a client's cost; `socket` includes
uvicorn and an httpx client on loopback, both on this core.

    python benchmarks/bench_proxy.py
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import orjson

from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import (
    Completion,
    FinishReason,
    Message,
    ParsedReply,
    Role,
    SamplingParams,
    SessionAccess,
    SessionSpec,
    TokenIds,
    ToolCall,
)

type Body = dict[str, Any]
type Post = Callable[[bytes], Awaitable[bytes]]

_TURN_TOKENS = 400
"""Tokens that a turn adds while a conversation grows: about what a command and its output take."""
_MEASURED_TURN_TOKENS = 80
"""Tokens that a measured turn adds, so that the size stays what the table says."""
_CHARS_PER_TOKEN = 4
_PAUSE_S = 1.0
"""Where many agents share the proxy: the time that one spends on its tools between two turns."""
_TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool_{i}", "description": "x" * 3_000, "parameters": {"type": "object"}},
    }
    for i in range(5)
]
"""As large as the default tools of OpenHands: 15 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRenderer:
    """Costs nothing: one id for every four characters. What is measured is the proxy."""

    stop_token_ids: tuple[int, ...] = (0,)
    parsed: ParsedReply = field(
        default_factory=lambda: ParsedReply(
            message=Message(
                role=Role.ASSISTANT,
                content="I will look at the file.",
                tool_calls=(
                    ToolCall(id="", name="tool_0", arguments='{"command": "cat a.py", "timeout": 30}'),
                ),
            )
        )
    )

    def render_prompt(self, messages: Any, tools: Any) -> TokenIds:
        """Return as many ids as the text is worth."""
        return np.ones(sum(len(message.content) for message in messages) // _CHARS_PER_TOKEN, np.int32)

    def render_suffix(self, last_id: int | None, messages: Any, tools: Any) -> TokenIds:
        """Return as many ids as the new text is worth."""
        return self.render_prompt(messages, tools)

    def parse(self, completion_ids: TokenIds, tools: Any) -> ParsedReply:
        """Return the same reply always."""
        return self.parsed


class InstantSampler:
    """Returns 64 tokens at once, and keeps the length of the last prompt."""

    max_context_tokens = 1 << 20
    prompt_tokens = 0

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """Return the same completion always."""
        self.prompt_tokens = prompt_ids.size
        return Completion(
            token_ids=np.ones(64, np.int32),
            logprobs=np.full(64, -0.1, np.float32),
            weights_versions=np.zeros(64, np.int32),
            finish_reason=FinishReason.STOP,
        )


class Agent:
    """Re-sends everything each turn; writes the bytes before the clock starts."""

    def __init__(self, post: Post, *, start_tokens: int, wants_ids: bool = False) -> None:
        self._post = post
        self._messages: list[Body] = [
            {"role": "system", "content": "s" * 4_000},
            {"role": "user", "content": "u" * 1_000},
        ]
        self._start_tokens = start_tokens
        self._fields: Body = {"return_token_ids": True, "logprobs": True} if wants_ids else {}

    async def grow(self) -> None:
        """Run turns until the prompt has the size that is to be measured."""
        for _ in range(max(0, (self._start_tokens - 1_250) // _TURN_TOKENS)):
            await self.turn(_TURN_TOKENS)

    async def turn(self, tokens: int = _MEASURED_TURN_TOKENS) -> float:
        """Run one turn that adds `tokens`; returns its seconds."""
        body = orjson.dumps({"messages": self._messages, "tools": _TOOLS, **self._fields})
        started = time.perf_counter()
        answer = await self._post(body)
        elapsed_s = time.perf_counter() - started
        message = orjson.loads(answer)["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": "o" * ((tokens - 64) * _CHARS_PER_TOKEN),
        }
        self._messages += [message, result]
        return elapsed_s


def over_app(proxy: ChatCompletionsProxy, access: SessionAccess) -> Post:
    """Return a client without a client: one call of the ASGI app."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer " + access.api_key.encode())],
    }

    async def post(body: bytes) -> bytes:
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return requests.pop() if requests else await asyncio.get_running_loop().create_future()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await proxy.app(dict(scope), receive, send)
        assert sent[0]["status"] == 200, sent
        return b"".join(message.get("body", b"") for message in sent)

    return post


def over_socket(client: httpx.AsyncClient, access: SessionAccess) -> Post:
    """Return a client on loopback."""
    headers = {"authorization": f"Bearer {access.api_key}"}

    async def post(body: bytes) -> bytes:
        answer = await client.post(f"{access.base_url}/chat/completions", content=body, headers=headers)
        answer.raise_for_status()
        return answer.content

    return post


def show(name: str, times_s: list[float], prompt_tokens: int, cpu_s: float) -> None:
    """Print one row, in milliseconds; `prompt_tokens` is that of the last turn.

    The rate is turns for one second of this process's CPU, the agents' own bookkeeping included: it
    stays true on a machine that is busy with other things.
    """
    ordered = sorted(times_s)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    row = (
        f"{statistics.median(times_s) * 1e3:8.2f}",
        f"{p99 * 1e3:8.2f}",
        f"{cpu_s / len(times_s) * 1e3:8.2f}",
        f"{len(times_s) / cpu_s:8.0f}",
    )
    print(f"{name:34} {prompt_tokens:8} {len(times_s):6} {' '.join(row)}")


async def one_session(size: int, turns: int, *, is_socket: bool, wants_ids: bool) -> None:
    """Measure turns of one session that starts at `size` prompt tokens."""
    sampler = InstantSampler()
    proxy = ChatCompletionsProxy(sampler, FreeRenderer())
    async with serve(proxy), httpx.AsyncClient() as client:
        access = proxy.open(SessionSpec(rollout_id="b", sampling=SamplingParams(), ttl_s=3600))
        post = over_socket(client, access) if is_socket else over_app(proxy, access)
        agent = Agent(post, start_tokens=size - turns * _MEASURED_TURN_TOKENS // 2, wants_ids=wants_ids)
        await agent.grow()
        cpu_s = -time.process_time()
        times_s = [await agent.turn() for _ in range(turns)]
        cpu_s += time.process_time()
    way = ("socket" if is_socket else "app") + (", ids and log-probs" if wants_ids else "")
    show(way, times_s, sampler.prompt_tokens, cpu_s)


async def many_sessions(sessions: int, size: int, turns: int) -> None:
    """Measure latency and rate with `sessions` agents that all ask at once, in process."""
    sampler = InstantSampler()
    proxy = ChatCompletionsProxy(sampler, FreeRenderer())
    agents: list[Agent] = []
    for i in range(sessions):
        access = proxy.open(SessionSpec(rollout_id=f"b{i}", sampling=SamplingParams(), ttl_s=3600))
        agents.append(Agent(over_app(proxy, access), start_tokens=size))
    for agent in agents:
        await agent.grow()

    async def run(agent: Agent, start_s: float) -> list[float]:
        await asyncio.sleep(start_s)
        times_s: list[float] = []
        for _ in range(turns):
            times_s.append(await agent.turn())
            await asyncio.sleep(_PAUSE_S)
        return times_s

    cpu_s = -time.process_time()
    runs = (run(agent, _PAUSE_S * i / sessions) for i, agent in enumerate(agents))
    results = await asyncio.gather(*runs)
    cpu_s += time.process_time()
    show(
        f"{sessions} sessions, {_PAUSE_S} s between turns",
        [t for times_s in results for t in times_s],
        sampler.prompt_tokens,
        cpu_s,
    )


async def main(turns: int) -> None:
    """Print the table."""
    header = (f"{name:>8}" for name in ("p50 ms", "p99 ms", "cpu ms", "turns/s"))
    print(f"{'way':34} {'prompt':>8} {'turns':>6} {' '.join(header)}")
    for size in (2_000, 20_000, 100_000):
        await one_session(size, turns, is_socket=False, wants_ids=False)
    for size in (2_000, 20_000, 100_000):
        await one_session(size, turns, is_socket=True, wants_ids=False)
    await one_session(20_000, turns, is_socket=False, wants_ids=True)
    await many_sessions(64, 20_000, 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the proxy's overhead per turn.")
    parser.add_argument("--turns", type=int, default=60)
    asyncio.run(main(parser.parse_args().turns))
