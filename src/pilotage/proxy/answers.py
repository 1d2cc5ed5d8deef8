"""The one form of an answer inside the proxy, and how JSON and server-sent events are spelled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from pilotage.proxy.fields import JsonObject
from pilotage.types import Message, TokenIds, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that an answer is written from; dialects add no fact of their own."""

    name: str
    """Unique: the rollout and the turn. Example: `task-3-0-7` is turn 7 of `task-3-0`."""
    model: str
    turn: Turn
    """Ids, log-probs and why the sampler ended."""
    message: Message
    """Text, reasoning and calls; the calls' ids are unique in the session."""
    prompt_tokens: int
    prompt_ids: Callable[[], TokenIds]
    """Joins the ids that the sampler was given; called only for clients that ask for them."""
    sent: JsonObject
    """The body that is answered: it says how."""

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled."""
        return self.turn.completion_ids.size


def encode(body: JsonObject) -> bytes:
    """Return JSON bytes; arrays are written as lists."""
    # Arrays are written as they are: a Python list of 20,000 ids would take longer than all the rest.
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event, with its name where the dialect has names."""
    opening = f"event: {name}\n".encode() if name else b""
    return opening + b"data: " + encode(data) + b"\n\n"
