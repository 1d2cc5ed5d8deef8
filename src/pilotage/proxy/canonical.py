"""What two spellings of one message have in common.

Agents send an assistant message back in other words than it was given to them: null for empty content,
their own call ids, arguments with other spacing and key order, text parts for a string. The canonical
form forgets these, and nothing else: an argument that was added, dropped or changed makes another
message. A resent assistant message is only a label that finds the recorded ids; it is never encoded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import orjson

from pilotage.types import Message, Role

DIGEST_BYTES = 16
_MALFORMED_PLACEHOLDER = "_openhands_malformed_tool_call"
_RAW = "raw:"
_MAX_SAFE_INTEGER = 2**53 - 1
"""JavaScript's: up to it a float is the integer that it looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalCall:
    """One tool call without its id."""

    name: str
    arguments: str
    """Sorted compact JSON, or `raw:` and the text where it is no JSON."""

    @property
    def is_malformed(self) -> bool:
        """Whether the arguments are no JSON at all."""
        return self.arguments.startswith(_RAW)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalReply:
    """An assistant message without what agents are known to change."""

    content: str
    reasoning: str
    calls: tuple[CanonicalCall, ...]

    def says_the_same(self, sent: "CanonicalReply") -> bool:
        """Return whether `sent` has this reply's content and calls, whatever its reasoning.

        A call whose arguments were no JSON also comes back as OpenHands' placeholder, which keeps
        nothing of the text. Agents in JavaScript send 1.0 back as 1: to them it is one number.
        """
        return (
            self.content == sent.content
            and len(self.calls) == len(sent.calls)
            and all(map(_is_same_call, self.calls, sent.calls))
        )


def canonical_reply(message: Message) -> CanonicalReply:
    """Return the canonical form of an assistant message; white space around its text is dropped."""
    return CanonicalReply(
        content=message.content.strip(),
        reasoning=message.reasoning.strip(),
        calls=tuple(
            CanonicalCall(name=call.name, arguments=canonical_arguments(call.arguments))
            for call in message.tool_calls
        ),
    )


def canonical_arguments(text: str) -> str:
    """Return `text` as sorted compact JSON; text that is no JSON comes back after `raw:`.

    Raw control characters inside strings are accepted, as agents accept and repair them.
    """
    try:
        return canonical_json(orjson.loads(text)).decode()
    except ValueError:
        pass
    try:
        # Integers beyond 64 bits, NaN, control characters: the standard library reads them.
        value = json.loads(text, strict=False)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return _RAW + text


def canonical_json(value: object) -> bytes:
    """Return JSON bytes that do not depend on the order of keys.

    Raises:
        ValueError: the value holds what JSON cannot, or is nested deeper than 254 levels.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # what orjson raises, for all of these
        raise ValueError(str(error)) from error


def message_digest(message: Message) -> bytes:
    """Return 16 bytes that two messages of a role other than assistant share iff their text is equal.

    The id of the call that a tool message answers is left out: it is never rendered, and agents
    renumber calls. So is a tool message's `name`.
    """
    return _digest(message.role.encode(), [message.content])


def reply_digest(reply: CanonicalReply) -> bytes:
    """Return 16 bytes that two assistant messages share iff their canonical forms are equal."""
    calls = [part for call in reply.calls for part in (call.name, call.arguments)]
    return _digest(Role.ASSISTANT.encode(), [reply.content, reply.reasoning, *calls])


def value_digest(value: object) -> bytes:
    """Return 16 bytes that name a JSON value, whatever the order of its keys."""
    return blake2b(canonical_json(value), digest_size=DIGEST_BYTES).digest()


def _digest(role: bytes, parts: Sequence[str]) -> bytes:
    digest = blake2b(role, digest_size=DIGEST_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(b"%d:%b" % (len(encoded), encoded))
    return digest.digest()


def _is_same_call(recorded: CanonicalCall, sent: CanonicalCall) -> bool:
    if recorded.name != sent.name:
        return False
    if recorded.arguments == sent.arguments:
        return True
    if recorded.is_malformed:
        return _is_placeholder(sent.arguments)
    return not sent.is_malformed and _in_whole_numbers(recorded) == _in_whole_numbers(sent)


def _in_whole_numbers(call: CanonicalCall) -> str:
    """Return the arguments with every float that is an integer spelled as one; true stays apart from 1."""
    return json.dumps(json.loads(call.arguments, parse_float=_whole), sort_keys=True)


def _whole(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _MAX_SAFE_INTEGER else value


def _is_placeholder(arguments: str) -> bool:
    if _MALFORMED_PLACEHOLDER not in arguments:
        return False
    value = json.loads(arguments) if not arguments.startswith(_RAW) else None
    return isinstance(value, dict) and cast("dict[str, Any]", value).get(_MALFORMED_PLACEHOLDER) is True
