"""OpenAI's chat completions, as agents and LiteLLM speak them.

`return_token_ids` and `logprobs` add ids and log-probs to the answer; reasoning is `reasoning_content`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pilotage.proxy.answers import Answer, event
from pilotage.proxy.fields import JsonObject, as_list, as_object, flag, joined_text
from pilotage.proxy.reader import Reader, tool_schema
from pilotage.proxy.refusals import ContextExceeded, Refusal, bad_request, openai_error
from pilotage.proxy.requests import Asked
from pilotage.types import FinishReason, Message, Role, ToolCall, ToolSchema, Turn

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    count_path = None

    def read(self, sent: JsonObject, reader: Reader) -> Asked:
        """Read a body."""
        _refuse_unservable(sent)
        messages = sent.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages must be a list of at least one message", "messages")
        for name in ("return_token_ids", "logprobs"):
            flag(sent, name)
        flag(_stream_options(sent), "include_usage")
        return Asked(
            messages=reader.messages(as_list(messages, "messages"), _read_message),
            tools=reader.tools(sent.get("tools"), _read_tool),
            options=sent,
            is_streamed=flag(sent, "stream"),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `chat.completion`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", **_content(answer.message)},
            "finish_reason": _finish_reason(answer),
            "logprobs": None,
            **_recorded(answer),
        }
        body = {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
        return body | _prompt_ids(answer)

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield `chat.completion.chunk`s and `[DONE]`.

        Ids and log-probs ride whole on the chunk that carries the finish reason: a client that reads the
        terminal chunk has all of them, or none.
        """
        head = _head(answer, "chat.completion.chunk")
        for delta in _deltas(answer.message):
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        last = {"index": 0, "delta": {}, "finish_reason": _finish_reason(answer), **_recorded(answer)}
        yield event({**head, "choices": [last], **_prompt_ids(answer)})
        if flag(_stream_options(answer.sent), "include_usage"):
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """Return OpenAI's error; an overflow in the words that LiteLLM and agent SDKs recognise."""
        if not isinstance(refusal, ContextExceeded):
            return openai_error(refusal)
        message = (
            f"This model's maximum context length is {refusal.window_tokens} tokens. However, your messages"
            f" resulted in {refusal.prompt_tokens} tokens. Please reduce the length of the messages."
        )
        return openai_error(refusal, message=message, param="messages")


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


def _stream_options(sent: JsonObject) -> JsonObject:
    return as_object(sent.get("stream_options") or {}, "stream_options")


def _read_message(sent: object, at: int) -> Iterable[Message]:
    where = f"messages[{at}]"
    message = as_object(sent, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {sorted(_ROLES)}, got {role!r}", where)
    content = joined_text(message.get("content"), f"{where}.content", kinds=_TEXT_PARTS)
    if _ROLES[role] is not Role.ASSISTANT:
        call_id = str(message.get("tool_call_id") or "") if role == Role.TOOL else ""
        return (Message(role=_ROLES[role], content=content, tool_call_id=call_id),)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return (
        Message(
            role=Role.ASSISTANT,
            content=content,
            reasoning=joined_text(reasoning, f"{where}.reasoning_content", kinds=_TEXT_PARTS),
            tool_calls=tuple(_read_calls(message.get("tool_calls"), f"{where}.tool_calls")),
        ),
    )


def _read_calls(sent: object, where: str) -> Iterator[ToolCall]:
    for index, item in enumerate(as_list(sent, where)):
        call = as_object(item, f"{where}[{index}]")
        function = as_object(call.get("function"), f"{where}[{index}].function")
        name, arguments = function.get("name"), function.get("arguments")
        # Text that is no JSON is fine: it is what the policy wrote, or what became of it.
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise bad_request(f"{where}[{index}].function needs a name and arguments that are strings", where)
        yield ToolCall(id=str(call.get("id") or ""), name=name, arguments=arguments or "")


def _read_tool(sent: object, where: str) -> ToolSchema:
    tool = as_object(sent, where)
    if tool.get("type") != "function":
        raise bad_request(f"{where}.type must be 'function', got {tool.get('type')!r}", where)
    function = as_object(tool.get("function"), f"{where}.function")
    return tool_schema(function, f"{where}.function", parameters="parameters")


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    created = int(answer.turn.finished_at)
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": created, "model": answer.model}


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
    if answer.turn.finish_reason is FinishReason.STOP and answer.message.tool_calls:
        return "tool_calls"
    return answer.turn.finish_reason.value


def _recorded(answer: Answer) -> dict[str, Any]:
    """Return the ids and log-probs that were asked for."""
    fields: dict[str, Any] = {}
    if flag(answer.sent, "logprobs"):
        fields["logprobs"] = _logprobs(answer.turn)
    if flag(answer.sent, "return_token_ids"):
        fields["token_ids"] = answer.turn.completion_ids
    return fields


def _prompt_ids(answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": answer.prompt_ids()} if flag(answer.sent, "return_token_ids") else {}


def _logprobs(turn: Turn) -> dict[str, Any]:
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.completion_ids.tolist(), turn.logprobs.tolist(), strict=True)
        ]
    }


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
