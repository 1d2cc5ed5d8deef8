"""JSON messages and tools -> records, with what the tree needs to compare them.

Agents send the whole conversation again each turn. A `Reader` keeps what it read last, by position, and
reads only what differs: the check is one comparison a message, at the speed of memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pilotage.proxy.canonical import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMessage:
    """One message of a request."""

    message: Message
    digest: bytes
    """16 bytes that name its canonical form."""
    reply: CanonicalReply | None
    """Canonical form where an assistant says it, None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTools:
    """The tools of a request."""

    schemas: tuple[ToolSchema, ...]
    digest: bytes


class Reader:
    """Reads the messages and tools of one session. Memory: the longest conversation, and each tool list."""

    def __init__(self) -> None:
        self._seen: list[tuple[object, ReadMessage]] = []
        self._tools: dict[bytes, ReadTools] = {}

    def messages(self, sent: object) -> tuple[ReadMessage, ...]:
        """Read the `messages` of a request.

        Raises:
            Refusal: 400 that names the message and the field.
        """
        if not isinstance(sent, list) or not sent:
            raise bad_request("messages must be a list of at least one message", "messages")
        return tuple(self._message(item, index) for index, item in enumerate(cast("list[object]", sent)))

    def tools(self, sent: object) -> ReadTools:
        """Read the `tools` of a request; an empty list is the same as none.

        Raises:
            Refusal: 400 that names the tool and the field.
        """
        if not isinstance(sent, list | None):
            raise bad_request("tools must be a list or null", "tools")
        offered = cast("list[object]", sent or [])
        digest = value_digest(offered)
        if digest not in self._tools:
            schemas = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered))
            self._tools[digest] = ReadTools(schemas=schemas, digest=digest)
        return self._tools[digest]

    def _message(self, sent: object, index: int) -> ReadMessage:
        # Everything that is read is text or null, so equal in Python means equal in JSON.
        if index < len(self._seen) and self._seen[index][0] == sent:
            return self._seen[index][1]
        message = _read_message(sent, f"messages[{index}]")
        reply = canonical_reply(message) if message.role is Role.ASSISTANT else None
        digest = message_digest(message) if reply is None else reply_digest(reply)
        read = ReadMessage(message=message, digest=digest, reply=reply)
        self._seen[index : index + 1] = [(sent, read)]
        return read


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
        # Text that is no JSON is fine: it is what the policy wrote, or what became of it.
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise bad_request(f"{where}[{index}].function needs a name and arguments that are strings", where)
        yield ToolCall(id=str(call.get("id") or ""), name=name, arguments=arguments or "")


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
