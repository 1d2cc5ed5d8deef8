"""OpenAI's Responses, as its SDKs and Codex speak them.

A conversation is a list of items. The items of one answer (reasoning, a message, calls), sent back one after
another, are one assistant message here:

    [message user] [reasoning, message, function_call, function_call] [function_call_output] ...
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from pilotage.proxy.answers import Answer, event
from pilotage.proxy.fields import (
    JsonObject,
    as_list,
    as_object,
    as_text,
    flag,
    joined_text,
    required_text,
    unreadable,
)
from pilotage.proxy.reader import Reader, tool_schema
from pilotage.proxy.refusals import ContextExceeded, Refusal, bad_request, openai_error
from pilotage.proxy.requests import Asked
from pilotage.types import FinishReason, Message, Role, ToolCall, ToolSchema

_ROLES = {role.value: role for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT)} | {"developer": Role.SYSTEM}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_SEPARATOR = "\n\n"
"""Between the instructions and the system messages that follow them: chat templates know one."""
_UNSERVABLE = {
    "previous_response_id": "send the whole conversation as input, with the output items of each answer",
    "conversation": "send the whole conversation as input, with the output items of each answer",
    "prompt": "send the text of the prompt as instructions and input",
    "background": "leave it out, and wait for the answer",
}
"""Fields that change what is answered -> what to do instead."""
_INCLUDABLE = ("reasoning.encrypted_content",)
"""May be asked for and is not needed: reasoning goes out as text."""

type _Part = tuple[int, str, list[object]]
"""Where it begins in the input, the instructions (of the first part only), and the items of one message."""


class OpenAIResponses:
    """`POST /v1/responses`."""

    path = "/v1/responses"
    count_path = None

    def read(self, sent: JsonObject, reader: Reader) -> Asked:
        """Read a body."""
        _refuse_unservable(sent)
        return Asked(
            messages=reader.messages(_parts(sent), _read_part),
            tools=reader.tools(sent.get("tools"), _read_tool),
            options=_options(sent),
            is_streamed=flag(sent, "stream"),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `response`."""
        is_cut = answer.turn.finish_reason is FinishReason.LENGTH
        return {
            **_opened(answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": int(answer.turn.finished_at),
            "output": _items(answer),
            "usage": _usage(answer),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the events of the response, of each item and of each part, numbered from 0."""
        for number, fields in enumerate(self._events(answer)):
            yield event({**fields, "sequence_number": number}, fields["type"])

    def _events(self, answer: Answer) -> Iterator[dict[str, Any]]:
        opened = _opened(answer)
        yield {"type": "response.created", "response": opened}
        yield {"type": "response.in_progress", "response": opened}
        for index, item in enumerate(_items(answer)):
            where = {"output_index": index, "item_id": item["id"]}
            empty, filling = _in_events(item)
            yield {"type": "response.output_item.added", "output_index": index, "item": empty}
            for fields in filling:
                yield {**fields, **where}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        whole = self.whole(answer)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """Return OpenAI's error; an overflow in the words of this API and of chat completions."""
        if not isinstance(refusal, ContextExceeded):
            return openai_error(refusal)
        message = (
            "Your input exceeds the context window of this model. Please adjust your input and try again."
            f" This model's maximum context length is {refusal.window_tokens} tokens; your input has"
            f" {refusal.prompt_tokens}."
        )
        return openai_error(refusal, message=message, param="input")


def _refuse_unservable(sent: JsonObject) -> None:
    for name, instead in _UNSERVABLE.items():
        if sent.get(name):
            raise bad_request(f"{name} is not supported: {instead}", name, "unsupported_parameter")
    for index, name in enumerate(as_list(sent.get("include"), "include")):
        if name not in _INCLUDABLE:
            where = f"include[{index}]"
            message = f"{where} {name!r} is not supported; leave it out"
            raise bad_request(message, where, "unsupported_parameter")


def _options(sent: JsonObject) -> dict[str, Any]:
    text = as_object(sent.get("text") or {}, "text")
    reasoning = as_object(sent.get("reasoning") or {}, "reasoning")
    own = ("temperature", "top_p", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_tool_calls")
    return {
        **{name: sent.get(name) for name in own},
        "max_tokens": sent.get("max_output_tokens"),
        "response_format": text.get("format"),
        "reasoning_effort": reasoning.get("effort"),
        "truncation": sent.get("truncation"),
    }


def _parts(sent: JsonObject) -> Iterator[_Part]:
    """Cut the input where one message ends and the next begins."""
    instructions = as_text(sent.get("instructions"), "instructions")
    given = sent.get("input")
    items: list[object] = (
        [{"role": "user", "content": given}] if isinstance(given, str) else as_list(given, "input")
    )
    if not items:
        raise bad_request("input must be a string or a list of at least one item", "input")
    ranks = [_rank(item, f"input[{at}]") for at, item in enumerate(items)]
    start = next((at for at, rank in enumerate(ranks) if rank is not _Rank.SYSTEM), len(items))
    if instructions or start:
        yield (0, instructions, items[:start])
    while start < len(items):
        end = start + 1
        while end < len(items) and ranks[end].continues(ranks[end - 1]):
            end += 1
        yield (start, "", items[start:end])
        start = end


class _Rank(Enum):
    """What an item is, in the order in which the items of one answer stand."""

    SYSTEM = 0
    OTHER = 1
    REASONING = 2
    REPLY = 3
    CALL = 4

    def continues(self, before: "_Rank") -> bool:
        """Return whether an item belongs to the same answer as the item before it."""
        if before.value < _Rank.REASONING.value:
            return False
        return self.value > before.value or self is before is _Rank.CALL


def _rank(sent: object, where: str) -> _Rank:
    item = as_object(sent, where)
    match item.get("type") or "message":
        case "function_call":
            return _Rank.CALL
        case "reasoning":
            return _Rank.REASONING
        case "function_call_output":
            return _Rank.OTHER
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise bad_request(f"{where}.role must be one of {sorted(_ROLES)}, got {role!r}", where)
            return _RANKS_OF_ROLES[_ROLES[role]]
        case kind:
            raise unreadable(kind, where)


_RANKS_OF_ROLES = {Role.SYSTEM: _Rank.SYSTEM, Role.USER: _Rank.OTHER, Role.ASSISTANT: _Rank.REPLY}


def _read_part(part: _Part, at: int) -> Iterable[Message]:
    start, instructions, sent = part
    items = [(as_object(item, f"input[{start + i}]"), f"input[{start + i}]") for i, item in enumerate(sent)]
    if not items or _rank(*items[0]) is _Rank.SYSTEM:
        texts = [instructions, *(_text(item, where) for item, where in items)]
        return (Message(role=Role.SYSTEM, content=_SEPARATOR.join(text for text in texts if text)),)
    if _rank(*items[0]) is not _Rank.OTHER:
        return (_read_reply(items),)
    [(item, where)] = items
    if item.get("type") != "function_call_output":
        return (Message(role=Role.USER, content=_text(item, where)),)
    output = joined_text(item.get("output"), f"{where}.output", kinds=_TEXT_PARTS)
    call_id = required_text(item, "call_id", where)
    return (Message(role=Role.TOOL, content=output, tool_call_id=call_id),)


def _read_reply(items: list[tuple[JsonObject, str]]) -> Message:
    content = reasoning = ""
    calls: list[ToolCall] = []
    for item, where in items:
        match _rank(item, where):
            case _Rank.REASONING:
                field = "content" if item.get("content") else "summary"
                reasoning = joined_text(item.get(field), f"{where}.{field}", kinds=_THOUGHTS, separator="\n")
            case _Rank.CALL:
                calls.append(
                    ToolCall(
                        id=required_text(item, "call_id", where),
                        name=required_text(item, "name", where),
                        arguments=as_text(item.get("arguments"), f"{where}.arguments"),
                    )
                )
            case _:
                content = _text(item, where)
    return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=tuple(calls))


def _text(item: JsonObject, where: str) -> str:
    return joined_text(item.get("content"), f"{where}.content", kinds=_TEXT_PARTS)


def _read_tool(sent: object, where: str) -> ToolSchema:
    tool = as_object(sent, where)
    if tool.get("type") != "function":
        message = (
            f"{where}.type must be 'function', got {tool.get('type')!r}: the agent runs its tools itself"
        )
        raise bad_request(message, where, "unsupported_tool")
    return tool_schema(tool, where, parameters="parameters")


def _opened(answer: Answer) -> dict[str, Any]:
    """Return the response as it begins; its sampling options are the recipe's."""
    sent, own = answer.sent, answer.turn.sampling
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": int(answer.turn.finished_at),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        "instructions": sent.get("instructions"),
        "metadata": sent.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": own.temperature,
        "top_p": own.top_p,
        "max_output_tokens": own.max_tokens,
        "tool_choice": "auto",
        "tools": sent.get("tools") or [],
        "usage": None,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    """Return the output: an answer that says nothing is an empty message, so that it can be sent back."""
    message = answer.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"id": f"rs_{answer.name}", "type": "reasoning", "summary": [], "content": [thought]})
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        reply = {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "content": [text]}
        items.append({**reply, "status": "completed"})
    for call in message.tool_calls:
        item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        items.append({**item, "arguments": call.arguments, "status": "completed"})
    if answer.turn.finish_reason is FinishReason.LENGTH:
        items[-1]["status"] = "incomplete"
    return items


def _in_events(item: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an item as it begins, and the events that fill it."""
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        kind, text = "response.function_call_arguments", item["arguments"]
        return {**begun, "arguments": ""}, [
            {"type": f"{kind}.delta", "delta": text},
            {"type": f"{kind}.done", "arguments": text, "name": item["name"]},
        ]
    [part] = item["content"]
    kind = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
    own = {} if item["type"] == "reasoning" else {"logprobs": []}
    filling = [
        {"type": "response.content_part.added", "part": {**part, "text": ""}},
        {"type": f"{kind}.delta", "delta": part["text"], **own},
        {"type": f"{kind}.done", "text": part["text"], **own},
        {"type": "response.content_part.done", "part": part},
    ]
    return {**begun, "content": []}, [{**fields, "content_index": 0} for fields in filling]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
