"""Trainer settings and figures as JSON: closed, and exact, NaN and the infinities included."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pilotage.types import AdamParams, ForwardBackwardResult, StepResult
from pilotage.wire.fields import invalid_body


class _Document[T](BaseModel):
    # JSON has no NaN: a loss that overflowed crosses as a string, so that the driver sees what happened.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    record: T


_DOCUMENTS: dict[type, type[_Document[Any]]] = {
    AdamParams: _Document[AdamParams],
    ForwardBackwardResult: _Document[ForwardBackwardResult],
    StepResult: _Document[StepResult],
}
_HEAD, _TAIL = b'{"record":', b"}"


def record_to_json(record: AdamParams | ForwardBackwardResult | StepResult) -> bytes:
    """Return a record as a JSON object of all its fields."""
    text = _DOCUMENTS[type(record)](record=record).model_dump_json().encode()
    return text.removeprefix(_HEAD).removesuffix(_TAIL)


def record_from_json[T: AdamParams | ForwardBackwardResult | StepResult](
    record_type: type[T], body: bytes
) -> T:
    """Read what `record_to_json` wrote.

    Raises:
        InvalidBodyError: it is no such object; absent fields without a default and unknown ones have a path.
    """
    try:
        return _DOCUMENTS[record_type].model_validate_json(_HEAD + body + _TAIL).record
    except ValidationError as error:
        fault = invalid_body(error)
        fault.path = fault.path.removeprefix("record").removeprefix(".")
        raise fault from None
