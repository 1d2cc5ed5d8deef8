"""The client side of each dialect: a history in chat form -> a body, and an answer -> a message in chat form.

What a client keeps of an answer's calls is the text of their arguments; where the dialect has an object
there, the text is that object's JSON.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

type Body = dict[str, Any]


class Tongue(Protocol):
    """One dialect, as a client speaks it."""

    path: str

    def body(self, messages: Sequence[Body], tools: Sequence[Body]) -> Body:
        """Return the request for a history."""
        ...

    def message(self, answer: Body) -> Body:
        """Return the assistant message of an answer."""
        ...


class Chat:
    path = "/v1/chat/completions"

    def body(self, messages: Sequence[Body], tools: Sequence[Body]) -> Body:
        return {"messages": messages, "tools": tools}

    def message(self, answer: Body) -> Body:
        return answer["choices"][0]["message"]


class Messages:
    path = "/v1/messages"

    def body(self, messages: Sequence[Body], tools: Sequence[Body]) -> Body:
        sent: list[Body] = []
        system = ""
        for message in messages:
            role, text = message["role"], text_of(message)
            if role == "system":
                system = text
            elif role == "assistant":
                sent.append({"role": role, "content": _blocks(message, text)})
            elif role == "tool":
                result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}
                if sent and isinstance(sent[-1]["content"], list) and sent[-1]["role"] == "user":
                    sent[-1]["content"].append(result)
                else:
                    sent.append({"role": "user", "content": [result]})
            else:
                sent.append({"role": role, "content": text})
        functions = [tool["function"] for tool in tools]
        offered = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
        return {"system": system, "messages": sent, "tools": offered, "max_tokens": 64}

    def message(self, answer: Body) -> Body:
        kept: Body = {"role": "assistant", "content": ""}
        for block in answer["content"]:
            if block["type"] == "text":
                kept["content"] = block["text"]
            elif block["type"] == "thinking":
                kept["reasoning_content"] = block["thinking"]
            else:
                arguments = json.dumps(block["input"])
                kept.setdefault("tool_calls", []).append(call(block["id"], block["name"], arguments))
        return kept


class Responses:
    path = "/v1/responses"

    def body(self, messages: Sequence[Body], tools: Sequence[Body]) -> Body:
        items: list[Body] = []
        for message in messages:
            if message["role"] == "tool":
                output = {"call_id": message["tool_call_id"], "output": text_of(message)}
                items.append({"type": "function_call_output", **output})
            elif message["role"] == "assistant":
                items += _items(message)
            else:
                items.append({"role": message["role"], "content": _parts(message, "input_text")})
        return {"input": items, "tools": [{"type": "function", **tool["function"]} for tool in tools]}

    def message(self, answer: Body) -> Body:
        kept: Body = {"role": "assistant", "content": ""}
        for item in answer["output"]:
            if item["type"] == "message":
                kept["content"] = item["content"][0]["text"]
            elif item["type"] == "reasoning":
                kept["reasoning_content"] = item["content"][0]["text"]
            else:
                made = call(item["call_id"], item["name"], item["arguments"])
                kept.setdefault("tool_calls", []).append(made)
        return kept


TONGUES: dict[str, Tongue] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}


def call(id: str, name: str, arguments: str) -> Body:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(message: Body) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _parts(message: Body, kind: str) -> str | list[Body]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return [{"type": kind, "text": part["text"]} for part in content]


def _blocks(message: Body, text: str) -> list[Body]:
    blocks: list[Body] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"})
    if text:
        blocks.append({"type": "text", "text": text})
    for made in message.get("tool_calls", []):
        given = json.loads(made["function"]["arguments"])
        blocks.append(
            {"type": "tool_use", "id": made["id"], "name": made["function"]["name"], "input": given}
        )
    return blocks


def _items(message: Body) -> list[Body]:
    items: list[Body] = []
    calls = message.get("tool_calls", [])
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [thought]})
    if message.get("content") or not calls:
        items.append({"type": "message", "role": "assistant", "content": _parts(message, "output_text")})
    for made in calls:
        items.append({"type": "function_call", "call_id": made["id"], **made["function"]})
    return items
