"""Chat messages as the renderer reads them: one shape for every agent and every chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of an offered tool."""

    id: str
    """Names the call in the tool message that answers it; made by the proxy, never rendered."""
    name: str
    arguments: str
    """JSON text of an object; any other text where the policy wrote a malformed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool that the agent offers in a request."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON schema of the arguments object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; text parts are joined before it is built."""

    role: Role
    content: str = ""
    reasoning: str = ""
    """What an assistant thought before it answered; empty where the agent dropped it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool message: the call that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What a renderer read out of sampled ids; the ids stay the truth."""

    message: Message
    malformed_calls: int = 0
    """Calls that could not be parsed; each still appears in `message.tool_calls`, with its raw text as
    arguments, so that the agent answers it with an error and the rollout lives on."""
