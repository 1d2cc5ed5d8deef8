"""Hermes-style calls: one JSON object with `name` and `arguments` between the call markers."""

import re

from pilotage.rendering.dialect import CallText, dump_json, load_json, load_object, malformed
from pilotage.types import ToolCall

_NAME = re.compile(r'"name"\s*:\s*"([^"\\\n]+)"')


def write_call(call: ToolCall) -> str:
    """Return the JSON of a call; arguments that are no JSON object are written as they are."""
    arguments = load_object(call.arguments)
    text = call.arguments if arguments is None else dump_json(arguments)
    return f'{{"name": "{call.name}", "arguments": {text}}}'


def read_call(text: str) -> CallText:
    """Read one call. JSON carries its own types, so nothing is converted and no name is repaired."""
    try:
        body = load_json(text)
    except ValueError:
        found = _NAME.search(text)
        return malformed(text, found.group(1) if found else "")
    if not isinstance(body, dict) or not isinstance(name := body.get("name"), str) or not name.strip():
        return malformed(text)
    arguments = body.get("arguments")
    if not isinstance(arguments, dict):
        return malformed(text, name)
    return CallText(name=name, arguments=dump_json(arguments))
