"""Anthropic's Messages, as its SDKs and the agent `claude-code` speak them.

A tool's `input` is a JSON object, but a policy may write a call whose arguments are none. Such a call goes
out as an object that holds the text, and comes back as the text:

    {"cmd": "ls       ->  {"malformed_arguments": "{\"cmd\": \"ls"}  ->  {"cmd": "ls
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import orjson

from pilotage.proxy.answers import Answer, event
from pilotage.proxy.canonical import canonical_arguments, canonical_json
from pilotage.proxy.fields import (
    JsonObject,
    as_list,
    as_object,
    as_text,
    flag,
    joined_text,
    required_text,
    spelling,
    unreadable,
)
from pilotage.proxy.reader import Reader, tool_schema
from pilotage.proxy.refusals import ContextExceeded, Refusal, bad_request
from pilotage.proxy.requests import Asked
from pilotage.types import FinishReason, Message, Role, ToolCall, ToolSchema

MALFORMED_KEY = "malformed_arguments"

_TEXT_BLOCKS = {"text": "text"}
_SEPARATOR = "\n"
"""Between text blocks of one message: an API of blocks promises nothing of how they are joined."""
_SIGNATURE = "unsigned"
"""Of thinking blocks. Clients keep it and send it back; nothing here reads it."""
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

type _Part = tuple[str, object, bytes]
"""A place, what was sent there, and the spelling of what an assistant sent: inputs hold numbers."""


class AnthropicMessages:
    """`POST /v1/messages`, and `POST /v1/messages/count_tokens`."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def read(self, sent: JsonObject, reader: Reader) -> Asked:
        """Read a body."""
        if sent.get("mcp_servers"):
            message = (
                "mcp_servers is not supported: the agent calls its servers itself and offers their tools"
            )
            raise bad_request(message, "mcp_servers", "unsupported_parameter")
        messages = reader.messages(_parts(sent), _read_part)
        if messages[-1].reply is not None:
            message = "messages must end with a user message; this policy does not continue an assistant's"
            raise bad_request(message, "messages")
        return Asked(
            messages=messages,
            tools=reader.tools(sent.get("tools"), _read_tool),
            options=_options(sent),
            is_streamed=flag(sent, "stream"),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `message`."""
        return {
            **_head(answer),
            "content": list(_blocks(answer.message)),
            "stop_reason": _stop_reason(answer),
            "usage": _usage(answer, answer.completion_tokens),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield `message_start`, each block's start, deltas and stop, `message_delta`, `message_stop`."""
        start = {**_head(answer), "content": [], "stop_reason": None, "usage": _usage(answer, 0)}
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(answer.message)):
            empty, deltas = _in_deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        stop = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        yield _event("message_delta", delta=stop, usage=_usage(answer, answer.completion_tokens))
        yield _event("message_stop")

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """Return Anthropic's error; an overflow in the words that its clients look for."""
        message = refusal.message
        if isinstance(refusal, ContextExceeded):
            message = f"prompt is too long: {refusal.prompt_tokens} tokens > {refusal.window_tokens} maximum"
        kind = _ERRORS.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": refusal.code}}


def _options(sent: JsonObject) -> dict[str, Any]:
    choice = sent.get("tool_choice")
    kind = cast("JsonObject", choice).get("type") if isinstance(choice, dict) else None
    own = ("temperature", "top_p", "top_k", "max_tokens", "thinking", "context_management", "output_config")
    return {
        **{name: sent.get(name) for name in own},
        "stop": sent.get("stop_sequences"),
        "tool_choice": "auto" if kind == "auto" else choice,
    }


def _parts(sent: JsonObject) -> Iterator[_Part]:
    messages = as_list(sent.get("messages"), "messages")
    if not messages:
        raise bad_request("messages must be a list of at least one message", "messages")
    if sent.get("system"):
        yield ("system", sent["system"], b"")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        is_reply = as_object(message, where).get("role") == "assistant"
        yield (where, message, spelling(message, where) if is_reply else b"")


def _read_part(part: _Part, at: int) -> Iterable[Message]:
    where, sent, _ = part
    if where == "system":
        text = joined_text(sent, where, kinds=_TEXT_BLOCKS, separator=_SEPARATOR)
        return (Message(role=Role.SYSTEM, content=text),)
    message = as_object(sent, where)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be 'user', 'assistant' or 'system', got {role!r}", where)
    if isinstance(content, str) or role == "system":
        text = joined_text(content, f"{where}.content", kinds=_TEXT_BLOCKS, separator=_SEPARATOR)
        return (Message(role=Role(role), content=text),)
    blocks = [
        (as_object(block, f"{where}.content[{i}]"), f"{where}.content[{i}]")
        for i, block in enumerate(as_list(content, f"{where}.content"))
    ]
    return _read_user(blocks) if role == "user" else (_read_assistant(blocks),)


def _read_user(blocks: list[tuple[JsonObject, str]]) -> Iterator[Message]:
    """Yield a tool message for each result, and a user message for each run of text."""
    texts: list[str] = []
    for block, where in blocks:
        if block.get("type") == "text":
            texts.append(as_text(block.get("text"), f"{where}.text"))
            continue
        if block.get("type") != "tool_result":
            raise unreadable(block.get("type"), where)
        if texts:
            yield Message(role=Role.USER, content=_SEPARATOR.join(texts))
            texts = []
        result = joined_text(
            block.get("content"), f"{where}.content", kinds=_TEXT_BLOCKS, separator=_SEPARATOR
        )
        yield Message(role=Role.TOOL, content=result, tool_call_id=str(block.get("tool_use_id") or ""))
    if texts or not blocks:
        yield Message(role=Role.USER, content=_SEPARATOR.join(texts))


def _read_assistant(blocks: list[tuple[JsonObject, str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(as_text(block.get("text"), f"{where}.text"))
            case "thinking":
                thoughts.append(as_text(block.get("thinking"), f"{where}.thinking"))
            case "tool_use":
                calls.append(
                    ToolCall(
                        id=str(block.get("id") or ""),
                        name=required_text(block, "name", where),
                        arguments=_arguments_of(as_object(block.get("input"), f"{where}.input")),
                    )
                )
            case kind:
                raise unreadable(kind, where)
    return Message(
        role=Role.ASSISTANT,
        content=_SEPARATOR.join(texts),
        reasoning=_SEPARATOR.join(thoughts),
        tool_calls=tuple(calls),
    )


def _read_tool(sent: object, where: str) -> ToolSchema:
    tool = as_object(sent, where)
    kind = tool.get("type") or "custom"
    if kind != "custom":
        message = f"{where}.type {kind!r} is not supported: offer a tool with a name and an input_schema"
        raise bad_request(message, where, "unsupported_tool")
    return tool_schema(tool, where, parameters="input_schema")


def _input_of(arguments: str) -> JsonObject:
    """Return the object that stands for `arguments`, such that `_arguments_of` finds their like again."""
    try:
        value = orjson.loads(arguments)
        # Integers beyond 64 bits are floats by now; what cannot make the way there and back goes as text.
        is_same = canonical_json(value).decode() == canonical_arguments(arguments)
    except ValueError:
        value, is_same = None, False
    if not isinstance(value, dict) or not is_same or value.keys() == {MALFORMED_KEY}:
        return {MALFORMED_KEY: arguments}
    return cast("JsonObject", value)


def _arguments_of(sent: JsonObject) -> str:
    raw = sent.get(MALFORMED_KEY)
    return raw if isinstance(raw, str) and len(sent) == 1 else canonical_json(sent).decode()


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.name}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_sequence": None,
    }


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE}
    if message.content:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call.arguments)}


def _in_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it starts, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return {**block, "thinking": "", "signature": ""}, deltas
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            text = orjson.dumps(block["input"]).decode()
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _stop_reason(answer: Answer) -> str:
    if answer.turn.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if answer.message.tool_calls else "end_turn"


def _usage(answer: Answer, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
