"""Bytes of a chat-completions request -> a record; every fault becomes a 400 that names its place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import cast

import orjson

from pilotage.proxy.canonical import DIGEST_BYTES, CanonicalReply
from pilotage.proxy.messages import JsonObject, Reader, ReadMessage, ReadTools
from pilotage.proxy.refusals import bad_request


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One parsed request. Example: a system and a user message have `digests` of 2 x 16 bytes."""

    messages: tuple[ReadMessage, ...]
    tools: ReadTools
    digests: bytes
    """Digest of every message, 16 bytes each, joined."""
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
        return blake2b(self.tools.digest + self.digests, digest_size=DIGEST_BYTES).digest()

    def reply_at(self, index: int) -> CanonicalReply | None:
        """Return the assistant message at `index`, or None where there is no message, or another's."""
        return self.messages[index].reply if index < len(self.messages) else None

    def span(self, start: int, end: int) -> bytes:
        """Return the digests of messages `start` to `end`."""
        return self.digests[start * DIGEST_BYTES : end * DIGEST_BYTES]


def parse_request(body: bytes, headers: Mapping[str, str], reader: Reader) -> ChatRequest:
    """Read one request.

    Raises:
        Refusal: 400 where a field has a shape that cannot be served; the message names it.
    """
    sent = _read_object(body)
    _refuse_unservable(sent)
    messages = reader.messages(sent.get("messages"))
    options: object = sent.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    hint = sent.get("prompt_cache_key") or headers.get("x-litellm-session-id") or ""
    return ChatRequest(
        messages=messages,
        tools=reader.tools(sent.get("tools")),
        digests=b"".join([read.digest for read in messages]),
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
