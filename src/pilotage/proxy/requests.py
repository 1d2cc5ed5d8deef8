"""Bytes of a chat-completions request -> a record; every fault becomes a 400 that names its place."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, cast

import orjson

from pilotage.proxy.canonical import (
    DIGEST_BYTES,
    CanonicalReply,
    canonical_reply,
    message_digest,
    reply_digest,
    value_digest,
)
from pilotage.proxy.refusals import bad_request
from pilotage.types import Message, Role, ToolCall, ToolSchema

type JsonObject = Mapping[str, Any]

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One parsed request. Example: a system and a user message have `digests` of 2 x 16 bytes."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    tools_digest: bytes
    digests: bytes
    """Digest of every message, 16 bytes each, joined."""
    replies: Mapping[int, CanonicalReply]
    """Canonical form of the assistant messages, by position."""
    body: JsonObject
    """Everything that was sent; read for the options that the agent does not own."""
    is_streamed: bool = False
    includes_usage: bool = False
    """Streams only: a usage chunk before the end."""
    wants_token_ids: bool = False
    wants_logprobs: bool = False
    conversation_hint: str = ""
    """The agent's own name for the conversation; empty where it sent none."""
    is_marked_retry: bool = False
    """Whether the client says that it sends these bytes again."""
    idempotency_key: str = ""

    @cached_property
    def key(self) -> bytes:
        """Names the prompt: equal for requests that would be rendered to the same ids."""
        return blake2b(self.tools_digest + self.digests, digest_size=DIGEST_BYTES).digest()

    def span(self, start: int, end: int) -> bytes:
        """Return the digests of messages `start` to `end`."""
        return self.digests[start * DIGEST_BYTES : end * DIGEST_BYTES]


@dataclass(slots=True)
class ToolsCache:
    """Tools by digest: agents send the same ten kilobytes each turn. One per session."""

    by_digest: dict[bytes, tuple[ToolSchema, ...]] = field(
        default_factory=dict[bytes, tuple[ToolSchema, ...]]
    )


def parse_request(body: bytes, headers: Mapping[str, str], tools_cache: ToolsCache) -> ChatRequest:
    """Read one request.

    Raises:
        Refusal: 400 where a field has a shape that cannot be served; the message names it.
    """
    sent = _read_object(body)
    _refuse_unservable(sent)
    messages = _read_messages(sent.get("messages"))
    replies = {i: canonical_reply(m) for i, m in enumerate(messages) if m.role is Role.ASSISTANT}
    tools_digest, tools = _read_tools(sent.get("tools"), tools_cache)
    options: object = sent.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    hint = sent.get("prompt_cache_key") or headers.get("x-litellm-session-id") or ""
    return ChatRequest(
        messages=messages,
        tools=tools,
        tools_digest=tools_digest,
        digests=b"".join(
            message_digest(message) if i not in replies else reply_digest(replies[i])
            for i, message in enumerate(messages)
        ),
        replies=replies,
        body=sent,
        is_streamed=_flag(sent, "stream"),
        includes_usage=_flag(cast("JsonObject", options), "include_usage"),
        wants_token_ids=_flag(sent, "return_token_ids"),
        wants_logprobs=_flag(sent, "logprobs"),
        conversation_hint=str(hint),
        is_marked_retry=_is_marked_retry(headers),
        idempotency_key=headers.get("idempotency-key", ""),
    )


def _read_object(body: bytes) -> JsonObject:
    try:
        sent = orjson.loads(body)
    except ValueError:
        sent = _read_lenient(body)
    if not isinstance(sent, dict):
        raise bad_request(f"the body must be a JSON object, got {type(sent).__name__}")
    return cast("JsonObject", sent)


def _read_lenient(body: bytes) -> object:
    """Read JSON with lone surrogates, which terminals' undecodable bytes become; they turn into U+FFFD."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error


def _refuse_unservable(sent: JsonObject) -> None:
    number = sent.get("n")
    if number not in (None, 1):
        message = (
            f"n={number!r} is not supported: a turn of a rollout is one completion; send n=1 or leave it out"
        )
        raise bad_request(message, "n", "unsupported_n")
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if sent.get(name):
            raise bad_request(f"{name} is not supported; use {instead}", name, "unsupported_parameter")


def _flag(sent: JsonObject, name: str) -> bool:
    value = sent.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise bad_request(f"{name} must be true or false, got {value!r}"[:200], name)


def _is_marked_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


def _read_messages(sent: object) -> tuple[Message, ...]:
    if not isinstance(sent, list) or not sent:
        raise bad_request("messages must be a list of at least one message", "messages")
    return tuple(
        _read_message(message, f"messages[{i}]") for i, message in enumerate(cast("list[object]", sent))
    )


def _read_message(sent: object, where: str) -> Message:
    message = _object(sent, where)
    role = _ROLES.get(cast("str", message.get("role"))) if isinstance(message.get("role"), str) else None
    if role is None:
        raise bad_request(f"{where}.role must be one of {sorted(_ROLES)}, got {message.get('role')!r}", where)
    content = _read_text(message.get("content"), f"{where}.content")
    if role is Role.ASSISTANT:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        return Message(
            role=role,
            content=content,
            reasoning=_read_text(reasoning, f"{where}.reasoning_content"),
            tool_calls=tuple(_read_calls(message.get("tool_calls"), f"{where}.tool_calls")),
        )
    call_id = message.get("tool_call_id") or ""
    return Message(role=role, content=content, tool_call_id=str(call_id) if role is Role.TOOL else "")


def _read_text(sent: object, where: str) -> str:
    """Return a string, or the joined text of a list of text parts; null is the empty string."""
    if isinstance(sent, str):
        return sent
    if sent is None:
        return ""
    if not isinstance(sent, list):
        raise bad_request(f"{where} must be a string, a list of text parts, or null", where)
    return "".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(cast("list[object]", sent)))


def _read_part(sent: object, where: str) -> str:
    if isinstance(sent, str):
        return sent
    part = _object(sent, where)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise bad_request(
            f"{where} has type {kind!r}; this policy reads text only", where, "unsupported_content"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text must be a string", where)
    return text


def _read_calls(sent: object, where: str) -> Iterable[ToolCall]:
    if sent is None:
        return
    if not isinstance(sent, list):
        raise bad_request(f"{where} must be a list or null", where)
    for index, item in enumerate(cast("list[object]", sent)):
        call = _object(item, f"{where}[{index}]")
        function = _object(call.get("function"), f"{where}[{index}].function")
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str):
            raise bad_request(f"{where}[{index}].function.name must be a string", where)
        yield ToolCall(id=str(call.get("id") or ""), name=name, arguments=_arguments_text(arguments))


def _arguments_text(sent: object) -> str:
    """Return the text of arguments; broken JSON is accepted as it is, an object is written as JSON."""
    if sent is None:
        return ""
    return sent if isinstance(sent, str) else orjson.dumps(sent).decode()


def _read_tools(sent: object, cache: ToolsCache) -> tuple[bytes, tuple[ToolSchema, ...]]:
    """Return digest and schemas; an empty list is the same as none."""
    if not isinstance(sent, list | None):
        raise bad_request("tools must be a list or null", "tools")
    offered = cast("list[object]", sent or [])
    digest = value_digest(offered)
    if digest not in cache.by_digest:
        cache.by_digest[digest] = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered))
    return digest, cache.by_digest[digest]


def _read_tool(sent: object, where: str) -> ToolSchema:
    tool = _object(sent, where)
    if tool.get("type") != "function":
        raise bad_request(f"{where}.type must be 'function', got {tool.get('type')!r}", where)
    function = _object(tool.get("function"), f"{where}.function")
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name or not isinstance(description, str):
        raise bad_request(f"{where}.function needs a name, and a description that is text", where)
    parameters = function.get("parameters")
    return ToolSchema(
        name=name,
        description=description,
        parameters={} if parameters is None else _object(parameters, f"{where}.function.parameters"),
    )


def _object(sent: object, where: str) -> JsonObject:
    if not isinstance(sent, dict):
        raise bad_request(f"{where} must be an object, got {type(sent).__name__}", where)
    return cast("JsonObject", sent)
