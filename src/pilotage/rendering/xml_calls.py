"""XML-style calls: `<function=NAME>` with a `<parameter=KEY>` for each argument.

The text of a parameter carries no type, so the offered tool's schema gives it. What the schema does not
settle stays a string: a wrong type is the agent's to refuse, a guessed one would be ours.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pilotage.rendering.dialect import CallText, dump_json, load_json, load_object, malformed
from pilotage.types import ToolCall, ToolSchema

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_NAME = re.compile(r"<function=([^>\n]+)")
# A value may hold the closing tag as text; the one that ends it is followed by the next parameter or the end.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
# Templates of this family write Python's spelling of these; the policy imitates what it was shown.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def write_call(call: ToolCall, *, writes_json_scalars: bool) -> str:
    """Return the XML of a call; arguments that are no JSON object are written as they are.

    Args:
        writes_json_scalars: write `true` and `null` where the older template writes `True` and `None`.
    """
    arguments = load_object(call.arguments)
    if arguments is None:
        body = f"{call.arguments}\n"
    else:
        body = "".join(
            f"<parameter={key}>\n{_write_value(value, writes_json_scalars)}\n</parameter>\n"
            for key, value in arguments.items()
        )
    return f"<function={call.name}>\n{body}</function>"


def read_call(text: str, tools: Sequence[ToolSchema]) -> CallText:
    """Read one call, its arguments typed by the schema of the tool that it names."""
    function = _FUNCTION.fullmatch(text)
    if function is None or not function.group(1).strip():
        found = _NAME.search(text)
        return malformed(text, found.group(1) if found else "")
    name, body = function.groups()
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    values: dict[str, object] = {}
    end = 0
    while body[end:].strip():
        parameter = _PARAMETER.match(body, end)
        if parameter is None or parameter.group(1) in values:
            return malformed(text, name)
        values[parameter.group(1)] = typed_value(parameter.group(2), parameter.group(1), schema)
        end = parameter.end()
    return CallText(name=name, arguments=dump_json(values))


def typed_value(text: str, key: str, schema: Mapping[str, Any]) -> object:
    """Return the value that `text` is under the schema of argument `key`; the text itself where it is none.

    A parameter that may be a string is a string. Any other is JSON, or one of `True`, `False`, `None`.
    """
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    allowed = set(_types(declared, schema, depth=0))
    if not allowed or "string" in allowed:
        return text
    literal = text.strip()
    try:
        value = load_json(_PYTHON_LITERALS.get(literal, literal))
    except ValueError:
        return text
    return value if not allowed.isdisjoint(_types_of(value)) else text


def _write_value(value: object, writes_json_scalars: bool) -> str:
    if isinstance(value, str):
        return value
    return dump_json(value) if writes_json_scalars or isinstance(value, dict | list) else str(value)


def _types(declared: object, root: Mapping[str, Any], *, depth: int) -> Iterator[str]:
    """Yield the JSON types that a schema allows, through local references and alternatives."""
    if not isinstance(declared, Mapping) or depth > 8:  # a schema may refer to itself
        return
    named = declared.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, Sequence):
        yield from (name for name in named if isinstance(name, str))
    for value in declared.get("enum", ()):
        yield from _types_of(value)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for alternative in declared.get(keyword, ()):
            yield from _types(alternative, root, depth=depth + 1)
    reference = declared.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types(target, root, depth=depth + 1)


def _types_of(value: object) -> tuple[str, ...]:
    """Return the JSON types that a value belongs to."""
    match value:
        case None:
            return ("null",)
        case bool():  # before int: Python counts True as one
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)
