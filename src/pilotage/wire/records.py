"""Trainer settings and figures as JSON: closed, and exact, NaN and the infinities included."""

from dataclasses import fields

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from pilotage.types import AdamParams, ForwardBackwardFigures, ForwardBackwardResult, StepResult
from pilotage.wire.fields import Fields, invalid_body
from pilotage.wire.frames import Tree, TreeLike


def record_to_json(record: AdamParams | StepResult) -> bytes:
    """Return a record as a JSON object of all its fields.

    JSON has no NaN: a loss that overflowed crosses as a string, so that the driver sees what happened.
    """
    return to_json(record, inf_nan_mode="strings")


def record_from_json[T: AdamParams | StepResult](record_type: type[T], body: bytes) -> T:
    """Read what `record_to_json` wrote.

    Raises:
        InvalidBodyError: it is no such object; absent fields without a default and unknown ones have a path.
    """
    try:
        return TypeAdapter(record_type).validate_json(body, extra="forbid")
    except ValidationError as error:
        raise invalid_body(error) from None


def pack_result(result: ForwardBackwardResult) -> dict[str, TreeLike]:
    """Return the reply of forward_backward: `figures`, an object, and `trainer_logprobs` float32 [n].

    The log-probs are absent where an engine does not say.
    """
    figures = {figure.name: getattr(result, figure.name) for figure in fields(ForwardBackwardFigures)}
    body: dict[str, TreeLike] = {"figures": orjson.loads(to_json(figures, inf_nan_mode="strings"))}
    if result.trainer_logprobs_n is not None:
        body["trainer_logprobs"] = result.trainer_logprobs_n
    return body


def unpack_result(tree: Tree) -> ForwardBackwardResult:
    """Read the reply of forward_backward.

    Raises:
        InvalidBodyError: it is not one, or it has not one log-prob for each trained token.
    """
    read = Fields(tree)
    try:
        figures = TypeAdapter(ForwardBackwardFigures).validate_python(read.need("figures"), extra="forbid")
    except ValidationError as error:
        raise invalid_body(error, "figures") from None
    logprobs = None
    if read.get("trainer_logprobs") is not None:  # a loss that overflowed has some that are not finite
        logprobs = read.array("trainer_logprobs", np.float32, figures.trained_tokens, finite=False)
    read.close()
    values = {figure.name: getattr(figures, figure.name) for figure in fields(ForwardBackwardFigures)}
    return ForwardBackwardResult(**values, trainer_logprobs_n=logprobs)
