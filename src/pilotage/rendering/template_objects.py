"""Messages and tools in the shape that chat templates read: the OpenAI objects, arguments decoded."""

from typing import Any

from pilotage.rendering.dialect import load_object
from pilotage.types import Message, ToolSchema


def tool_object(tool: ToolSchema) -> dict[str, Any]:
    """Return the OpenAI object of a tool; a tool without a description has no such key."""
    description = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def message_object(message: Message) -> dict[str, Any]:
    """Return the template's object of a message; arguments that are no JSON object stay text."""
    content: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        content["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        content["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    return content


def _arguments(text: str) -> object:
    arguments = load_object(text)
    return text if arguments is None else arguments
