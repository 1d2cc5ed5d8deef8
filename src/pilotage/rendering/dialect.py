"""What one chat template has to say about itself; a renderer is a tokenizer and a dialect."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pilotage.rendering.tokenizer import Segment
from pilotage.types import Message, ToolSchema

MALFORMED_NAME = "malformed_tool_call"
"""Name of a call whose own name could not be read; no agent offers it, so the agent answers an error."""

TURN_END = "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class ThinkBlock(StrEnum):
    """What the generation prompt writes after the assistant's header."""

    ABSENT = ""
    """Nothing: the policy opens a block itself, or does not think."""
    OPEN = "<think>\n"
    """An open block: a completion begins inside it."""
    EMPTY = "<think>\n\n</think>\n\n"
    """A closed block: thinking is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """One call as it was read out of the text between its markers."""

    name: str
    arguments: str
    """JSON text of an object, or, of a malformed call, text that is no JSON object."""
    is_malformed: bool = False


class Dialect(Protocol):
    """Pure functions of one chat template, in segments; closing a turn writes `<|im_end|>` and a newline."""

    @property
    def name(self) -> str:
        """Family, for people."""
        ...

    @property
    def think_block(self) -> ThinkBlock:
        """What follows the assistant's header in the generation prompt."""
        ...

    @property
    def splits_reasoning(self) -> bool:
        """Whether `<think>` blocks in a completion are reasoning."""
        ...

    def head(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Segment]:
        """Return the system block; empty where there is neither a system message nor a tool."""
        ...

    def turns(self, messages: Sequence[Message], *, is_suffix: bool) -> Iterable[Segment]:
        """Yield finished turns, each with its closing newline.

        Args:
            is_suffix: the messages follow recorded ones, among them the user's query.
        """
        ...

    def read_call(self, text: str, tools: Sequence[ToolSchema]) -> CallText:
        """Read the text between `<tool_call>` and `</tool_call>`; never raises."""
        ...


def load_json(text: str) -> object:
    """Parse JSON strictly: what is returned can be written as JSON in UTF-8 again.

    Raises:
        ValueError: broken, nested too deep, a number that JSON cannot write, or half a surrogate pair.
    """
    try:
        value = json.loads(text)
        dump_json(value).encode()
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value


def dump_json(value: object) -> str:
    """Return JSON text as chat templates write it: a space after commas and colons, no escapes of letters."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that `text` is, or None."""
    try:
        value = load_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def malformed(text: str, name: str = "") -> CallText:
    """Return the record of a call that could not be read.

    Its arguments are the text as written, never a JSON object: no tool can run on them by accident.
    """
    raw = text.strip()
    arguments = raw if load_object(raw) is None else dump_json(raw)
    return CallText(name=name.strip() or MALFORMED_NAME, arguments=arguments, is_malformed=True)
