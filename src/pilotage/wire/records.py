"""Trainer settings and figures as JSON: closed, and exact, NaN and the infinities included."""

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from pilotage.types import AdamParams, ForwardBackwardResult, StepResult
from pilotage.wire.fields import invalid_body


def record_to_json(record: AdamParams | ForwardBackwardResult | StepResult) -> bytes:
    """Return a record as a JSON object of all its fields.

    JSON has no NaN: a loss that overflowed crosses as a string, so that the driver sees what happened.
    """
    return to_json(record, inf_nan_mode="strings")


def record_from_json[T: AdamParams | ForwardBackwardResult | StepResult](
    record_type: type[T], body: bytes
) -> T:
    """Read what `record_to_json` wrote.

    Raises:
        InvalidBodyError: it is no such object; absent fields without a default and unknown ones have a path.
    """
    try:
        return TypeAdapter(record_type).validate_json(body, extra="forbid")
    except ValidationError as error:
        raise invalid_body(error) from None
