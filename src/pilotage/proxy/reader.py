"""Keeps what was read of one session, so that a conversation that grows is read once.

Agents send the whole conversation again each turn. A `Reader` keeps what it read last, by position, and has
only read what differs: the check is one comparison a part, at the speed of memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pilotage.proxy.canonical import (
    CanonicalReply,
    canonical_reply,
    message_digest,
    reply_digest,
    value_digest,
)
from pilotage.proxy.fields import JsonObject, as_list, as_object, spelling
from pilotage.proxy.refusals import bad_request
from pilotage.types import Message, Role, ToolSchema


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
    """Names the schemas, whatever the order of their keys."""


class Reader:
    """Reads messages and tools of one session in one dialect.

    Memory: the longest conversation, and each tool list.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[object, tuple[ReadMessage, ...]]] = []
        self._tools: dict[bytes, ReadTools] = {}

    def messages[P](
        self, parts: Iterable[P], read: Callable[[P, int], Iterable[Message]]
    ) -> tuple[ReadMessage, ...]:
        """Return the messages of `parts`, in order.

        Args:
            parts: JSON, cut so that a message lies in one part. Parts that are equal in Python must read
                the same: a number that is read needs its spelling beside it, since 1 == 1.0 == True.
            read: reads the part at a position; called for parts that differ from the last ones there.

        Raises:
            Refusal: what `read` raises.
        """
        return tuple(message for at, part in enumerate(parts) for message in self._part(part, at, read))

    def tools(self, sent: object, read: Callable[[object, str], ToolSchema]) -> ReadTools:
        """Read the `tools` of a request; an empty list is the same as none.

        Raises:
            Refusal: 400 that names the tool and the field.
        """
        offered = as_list(sent, "tools")
        name = spelling(offered, "tools")
        if name not in self._tools:
            schemas = tuple(read(tool, f"tools[{i}]") for i, tool in enumerate(offered))
            digest = value_digest([[tool.name, tool.description, tool.parameters] for tool in schemas])
            self._tools[name] = ReadTools(schemas=schemas, digest=digest)
        return self._tools[name]

    def _part[P](
        self, part: P, at: int, read: Callable[[P, int], Iterable[Message]]
    ) -> tuple[ReadMessage, ...]:
        if at < len(self._seen) and self._seen[at][0] == part:
            return self._seen[at][1]
        messages = tuple(_with_digest(message) for message in read(part, at))
        self._seen[at : at + 1] = [(part, messages)]
        return messages


def tool_schema(sent: JsonObject, where: str, *, parameters: str) -> ToolSchema:
    """Read the name, the description and, from the field `parameters`, the JSON schema of a tool.

    Raises:
        Refusal: one of them has a wrong shape.
    """
    name, description = sent.get("name"), sent.get("description") or ""
    if not isinstance(name, str) or not name or not isinstance(description, str):
        raise bad_request(f"{where} needs a name, and a description that is text", where)
    schema = sent.get(parameters)
    return ToolSchema(
        name=name,
        description=description,
        parameters={} if schema is None else as_object(schema, f"{where}.{parameters}"),
    )


def _with_digest(message: Message) -> ReadMessage:
    reply = canonical_reply(message) if message.role is Role.ASSISTANT else None
    digest = message_digest(message) if reply is None else reply_digest(reply)
    return ReadMessage(message=message, digest=digest, reply=reply)
