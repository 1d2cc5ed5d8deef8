"""A recorded turn -> the bytes of a chat completion, in one body or as server-sent events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from pilotage.proxy.requests import ChatRequest
from pilotage.proxy.tree import Reply
from pilotage.types import FinishReason, Message, TokenIds, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a reply is written from; the same for everyone who is answered with this turn."""

    id: str
    model: str
    turn: Turn
    reply: Reply
    prompt_tokens: int
    prompt_ids: TokenIds | None
    """None where the client did not ask for ids."""


def whole_body(answer: Answer, request: ChatRequest) -> bytes:
    """Return the JSON body of a reply that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", **_content(answer.reply.message)},
        "finish_reason": _finish_reason(answer),
        "logprobs": _logprobs(answer.turn) if request.wants_logprobs else None,
    }
    if request.wants_token_ids:
        choice["token_ids"] = answer.turn.completion_ids
    body = {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    return _encode(body if answer.prompt_ids is None else {**body, "prompt_token_ids": answer.prompt_ids})


def events(answer: Answer, request: ChatRequest) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed reply, `[DONE]` last.

    Ids and log-probs ride whole on the chunk that carries the finish reason: a client that reads the
    terminal chunk has all of them, or none.
    """
    head = _head(answer, "chat.completion.chunk")
    for delta in _deltas(answer.reply.message):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}
    if request.wants_logprobs:
        last["logprobs"] = _logprobs(answer.turn)
    if request.wants_token_ids:
        last["token_ids"] = answer.turn.completion_ids
    chunk = {**head, "choices": [last]}
    yield _event(chunk if answer.prompt_ids is None else {**chunk, "prompt_token_ids": answer.prompt_ids})
    if request.includes_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(answer.turn.finished_at), "model": answer.model}


def _content(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    if message.tool_calls:
        content["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return content


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    for index, call in enumerate(message.tool_calls):
        opening = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": opening}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}


def _finish_reason(answer: Answer) -> str:
    if answer.turn.finish_reason is FinishReason.STOP and answer.reply.message.tool_calls:
        return "tool_calls"
    return answer.turn.finish_reason.value


def _logprobs(turn: Turn) -> dict[str, Any]:
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.completion_ids.tolist(), turn.logprobs.tolist(), strict=True)
        ]
    }


def _usage(answer: Answer) -> dict[str, int]:
    sampled = answer.turn.completion_ids.size
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _encode(body: dict[str, Any]) -> bytes:
    # Arrays are written as they are: a Python list of 20,000 ids would take longer than all the rest.
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
