"""Small agents on the official SDKs: one for each dialect, all with the same face.

Each keeps its history as its SDK gave it, and sends it back as it stands.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from pilotage.proxy import ChatCompletionsProxy
from pilotage.types import SessionAccess

type Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What an SDK made of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, object], ...] = ()
    """Id, name and arguments; the arguments as the SDK gives them: JSON text, or an object."""
    finish: str = ""
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answer."""


def client_for(proxy: ChatCompletionsProxy) -> httpx.AsyncClient:
    """Return a client that hands requests to the app without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app))


@dataclass(slots=True)
class _History:
    """What an agent keeps."""

    system: str
    tools: Sequence[str]
    model: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Added to each request."""
    client: Any = None
    """The SDK's; its methods are typed for literals, and tests send variables."""
    items: list[Any] = field(default_factory=list[Any])


SCHEMA: Body = {"type": "object", "properties": {"path": {"type": "string"}}}


class ChatAgent(_History):
    """Chat completions through `openai`."""

    path = "/v1/chat/completions"

    def connect(self, access: SessionAccess, http: httpx.AsyncClient | None, **client: Any) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, http_client=http, **client
        )

    def hear(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def observe(self, results: Mapping[str, str]) -> None:
        self.items += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items()]

    async def speak(self, *, is_streamed: bool = False) -> Said:
        tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in self.tools]
        asked: Body = {
            "model": self.model,
            "messages": [{"role": "system", "content": self.system}, *self.items],
            **({"tools": tools} if tools else {}),
            **self.options,
        }
        if is_streamed:
            state = ChatCompletionStreamState()
            async for chunk in await self.client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            ):
                state.handle_chunk(chunk)
            answer: Any = state.current_completion_snapshot
        else:
            answer = await self.client.chat.completions.create(**asked)
        [choice] = answer.choices
        message = choice.message
        self.items.append(message.to_dict(mode="json"))
        return Said(
            text=message.content or "",
            reasoning=getattr(message, "reasoning_content", ""),
            calls=tuple(
                (call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
            ),
            finish=choice.finish_reason,
            usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens),
        )

    async def close(self) -> None:
        await self.client.close()


class AnthropicAgent(_History):
    """Messages through `anthropic`."""

    path = "/v1/messages"

    def connect(self, access: SessionAccess, http: httpx.AsyncClient | None, **client: Any) -> None:
        self.client = anthropic.AsyncAnthropic(
            base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key, http_client=http, **client
        )

    def hear(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def observe(self, results: Mapping[str, str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}]}
            for id, text in results.items()
        ]
        self.items.append({"role": "user", "content": blocks})

    async def speak(self, *, is_streamed: bool = False) -> Said:
        asked: Body = {
            "model": self.model,
            "max_tokens": 64,
            "system": [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}],
            "messages": self.items,
            **({"tools": [{"name": n, "input_schema": SCHEMA} for n in self.tools]} if self.tools else {}),
            **self.options,
        }
        if is_streamed:
            async with self.client.messages.stream(**asked) as stream:
                async for _ in stream:
                    pass
                answer: Any = await stream.get_final_message()
        else:
            answer = await self.client.messages.create(**asked)
        self.items.append({"role": "assistant", "content": answer.content})
        return Said(
            text="".join(block.text for block in answer.content if block.type == "text"),
            reasoning="".join(block.thinking for block in answer.content if block.type == "thinking"),
            calls=tuple(
                (block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"
            ),
            finish=answer.stop_reason,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
        )

    async def close(self) -> None:
        await self.client.close()


class ResponsesAgent(_History):
    """Responses through `openai`."""

    path = "/v1/responses"

    def connect(self, access: SessionAccess, http: httpx.AsyncClient | None, **client: Any) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, http_client=http, **client
        )

    def hear(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def observe(self, results: Mapping[str, str]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": id, "output": text} for id, text in results.items()
        ]

    async def speak(self, *, is_streamed: bool = False) -> Said:
        tools = [{"type": "function", "name": n, "parameters": SCHEMA, "strict": False} for n in self.tools]
        asked: Body = {
            "model": self.model,
            "instructions": self.system,
            "input": self.items,
            "tools": tools,
            "include": ["reasoning.encrypted_content"],
            "store": True,
            **self.options,
        }
        if is_streamed:
            answer = await self._streamed(asked)
        else:
            answer = await self.client.responses.create(**asked)
        self.items += [item.to_dict(mode="json") for item in answer.output]
        thoughts = [item for item in answer.output if item.type == "reasoning"]
        details = answer.incomplete_details
        return Said(
            text=answer.output_text,
            reasoning="".join(part.text for item in thoughts for part in item.content),
            calls=tuple(
                (item.call_id, item.name, item.arguments)
                for item in answer.output
                if item.type == "function_call"
            ),
            finish=details.reason if details else answer.status,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
        )

    async def _streamed(self, asked: Body) -> Any:
        """Return the response of the last event; what was streamed before must add up to it."""
        texts: dict[str, str] = {}
        numbers: list[int] = []
        final: Any = None
        async for event in await self.client.responses.create(**asked, stream=True):
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert numbers == list(range(len(numbers)))
        for item in final.output:
            whole = item.arguments if item.type == "function_call" else item.content[0].text
            assert texts[item.id] == whole
        return final

    async def close(self) -> None:
        await self.client.close()


type AnyAgent = ChatAgent | AnthropicAgent | ResponsesAgent

AGENTS: dict[str, type[AnyAgent]] = {
    "chat": ChatAgent,
    "messages": AnthropicAgent,
    "responses": ResponsesAgent,
}


def agent_for(
    kind: str,
    access: SessionAccess,
    proxy: ChatCompletionsProxy | None = None,
    *,
    tools: Sequence[str] = (),
    **client: Any,
) -> AnyAgent:
    """Return an agent; without `proxy` it goes through a real socket."""
    agent = AGENTS[kind]("be brief", tools, access.model)
    agent.connect(access, client_for(proxy) if proxy else None, **client)
    return agent


def as_object(arguments: object) -> object:
    """Return arguments as a value, whether the SDK gave text or an object."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments
