"""Checked access to the JSON of a request: a wrong shape is a 400 that names its place.

A place is a path such as `messages[0].content[1]`; the empty path is the whole body.
"""

from collections.abc import Mapping
from typing import Any, cast

from pilotage.proxy.canonical import canonical_json
from pilotage.proxy.refusals import Refusal, bad_request

type JsonObject = Mapping[str, Any]


def as_object(sent: object, where: str) -> JsonObject:
    """Return `sent` if it is an object.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(sent, dict):
        raise bad_request(f"{where} must be an object, got {type(sent).__name__}", where)
    return cast("JsonObject", sent)


def as_list(sent: object, where: str) -> list[object]:
    """Return `sent` if it is a list; null is the empty one.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(sent, list | None):
        raise bad_request(f"{where} must be a list or null, got {type(sent).__name__}", where)
    return cast("list[object]", sent or [])


def as_text(sent: object, where: str) -> str:
    """Return `sent` if it is a string; null is the empty one.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(sent, str | None):
        raise bad_request(f"{where} must be a string or null, got {type(sent).__name__}", where)
    return sent or ""


def required_text(sent: JsonObject, name: str, where: str) -> str:
    """Return the field `name` of `sent`, which must be a string that is not empty.

    Raises:
        Refusal: it is missing, empty or something else.
    """
    value = sent.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where}.{name} must be a string that is not empty", f"{where}.{name}")
    return value


def flag(sent: JsonObject, name: str) -> bool:
    """Return the field `name`, false where it is missing or null.

    Raises:
        Refusal: it is neither true nor false.
    """
    value = sent.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise bad_request(f"{name} must be true or false, got {value!r}"[:200], name)


def joined_text(sent: object, where: str, *, kinds: Mapping[str, str], separator: str = "") -> str:
    """Return a string, or the joined text of a list of text parts; null is the empty string.

    Args:
        kinds: the type of a part that is text -> the field that holds it.

    Raises:
        Refusal: another shape, or a part of another type; this policy reads text only.
    """
    if isinstance(sent, str):
        return sent
    if not isinstance(sent, list | None):
        raise bad_request(f"{where} must be a string, a list of text parts, or null", where)
    parts = cast("list[object]", sent or [])
    return separator.join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(parts))


def unreadable(kind: object, where: str) -> Refusal:
    """Return the 400 for a part, block or item of a type that this policy cannot be shown."""
    message = f"{where} has type {kind!r}; this policy reads text only"
    return bad_request(message, where, "unsupported_content")


def spelling(sent: object, where: str) -> bytes:
    """Return the JSON of `sent`, which tells 1, 1.0 and true apart, as Python's equality does not.

    Raises:
        Refusal: it is nested too deep.
    """
    try:
        return canonical_json(sent)
    except ValueError as error:
        raise bad_request(f"{where} is nested too deep", where) from error


def _part(sent: object, where: str, kinds: Mapping[str, str]) -> str:
    if isinstance(sent, str):
        return sent
    part = as_object(sent, where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unreadable(kind, where)
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise bad_request(f"{where}.{kinds[kind]} must be a string", where)
    return text
