"""Read what callers send: JSON bodies and numbers of queries, each refused with where it is wrong."""

from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from pilotage.service.refusals import Refusal, invalid
from pilotage.wire.core import ErrorCode


def parse[T: BaseModel](body_type: type[T], body: bytes) -> T:
    """Read a JSON body; an empty one is {}.

    Raises:
        Refusal: it is not one, with the path.
    """
    try:
        return body_type.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise invalid(error) from None


def json_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object whose keys are not looked at.

    Raises:
        Refusal: it is none.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(ErrorCode.INVALID, f"the body is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(ErrorCode.INVALID, "the body is a JSON object")
    return content


def whole_number(value: object, default: int) -> int:
    """Read a number from 0 on of at most 12 digits; an absent or empty one is `default`.

    Raises:
        Refusal: it is something else.
    """
    if value is None or value == "":
        return default
    text = str(value)
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise Refusal(ErrorCode.INVALID, f"expected a whole number, got {text[:40]!r}")
    return int(text)
