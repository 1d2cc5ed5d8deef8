"""The one form of a request inside the proxy, whatever dialect it came in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import cast

import orjson

from pilotage.proxy.canonical import DIGEST_BYTES, CanonicalReply
from pilotage.proxy.fields import JsonObject
from pilotage.proxy.reader import ReadMessage, ReadTools
from pilotage.proxy.refusals import bad_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a dialect reads out of a body."""

    messages: tuple[ReadMessage, ...]
    tools: ReadTools
    options: JsonObject
    """What the agent asks for and does not own, under chat completions' names (see `overrides`)."""
    is_streamed: bool


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A request for one turn. Example: a system and a user message have `digests` of 2 x 16 bytes."""

    asked: Asked
    sent: JsonObject
    """The body; the dialect that read it reads in it how the answer is to be written."""
    conversation_hint: str = ""
    """The agent's own name for the conversation; empty where it sent none."""
    is_marked_retry: bool = False
    """Whether the client says that it sends these bytes again."""
    idempotency_key: str = ""

    @property
    def messages(self) -> tuple[ReadMessage, ...]:
        """The whole conversation."""
        return self.asked.messages

    @property
    def tools(self) -> ReadTools:
        """The offered tools."""
        return self.asked.tools

    @cached_property
    def digests(self) -> bytes:
        """Digest of every message, 16 bytes each, joined."""
        return b"".join([read.digest for read in self.asked.messages])

    @cached_property
    def key(self) -> bytes:
        """Names the prompt: equal for requests that would be rendered to the same ids."""
        return blake2b(self.tools.digest + self.digests, digest_size=DIGEST_BYTES).digest()

    def reply_at(self, index: int) -> CanonicalReply | None:
        """Return the assistant message at `index`, or None where there is no message, or another's."""
        return self.messages[index].reply if index < len(self.messages) else None

    def span(self, start: int, end: int) -> bytes:
        """Return the digests of messages `start` to `end`."""
        return self.digests[start * DIGEST_BYTES : end * DIGEST_BYTES]


def turn_request(asked: Asked, sent: JsonObject, headers: Mapping[str, str]) -> TurnRequest:
    """Return the request with what every dialect says in the same fields and headers."""
    hint = sent.get("prompt_cache_key") or headers.get("x-litellm-session-id") or ""
    return TurnRequest(
        asked=asked,
        sent=sent,
        conversation_hint=str(hint),
        is_marked_retry=_is_marked_retry(headers),
        idempotency_key=headers.get("idempotency-key", ""),
    )


def read_object(body: bytes) -> JsonObject:
    """Return the JSON object that a body is.

    Raises:
        Refusal: 400 where it is none.
    """
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


def _is_marked_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0
