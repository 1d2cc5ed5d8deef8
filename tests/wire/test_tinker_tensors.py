"""The Tinker wire's tensors, against the SDK's own encoder and decoder, and in the JSON of older SDKs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from pilotage.errors import InvalidBodyError
from pilotage.types import Completion, FinishReason
from pilotage.wire.tinker import (
    address_of,
    forward_backward_json,
    read_forward_backward,
    read_forward_backward_json,
    samples_json,
    write_forward_backward,
    write_samples,
)

IDS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def datums(draw: st.DrawFn) -> sdk.Datum:
    ids = draw(st.lists(IDS, min_size=1, max_size=12))
    size = len(ids)
    cut = draw(st.integers(0, size))
    chunks: list[Any] = [sdk.EncodedTextChunk(tokens=part) for part in (ids[:cut], ids[cut:])]
    inputs: dict[str, Any] = {
        "target_tokens": draw(st.lists(IDS, min_size=size, max_size=size)),
        "weights": draw(st.lists(FLOATS, min_size=size, max_size=size)),
    }
    return sdk.Datum(model_input=sdk.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def encoded(data: list[sdk.Datum]) -> bytes:
    given = sdk.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    request = sdk.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def as_json(datum: sdk.Datum) -> dict[str, Any]:
    """Write a datum as SDKs did before they had a protobuf form."""
    chunks = [{"type": "encoded_text", "tokens": list(c.tokens)} for c in datum.model_input.chunks]  # pyright: ignore
    inputs = {
        name: {"data": list(tensor.data), "dtype": tensor.dtype, "shape": tensor.shape}
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


@given(st.lists(datums(), max_size=3))
def test_what_the_sdk_encodes_is_read_as_it_was_in_both_forms(data: list[sdk.Datum]) -> None:
    binary = read_forward_backward(encoded(data))
    assert address_of(encoded(data)) == ("s:train:0", 7)
    json_form = read_forward_backward_json(
        {
            "model_id": "s:train:0",
            "seq_id": 7,
            "forward_backward_input": {
                "data": [as_json(datum) for datum in data],
                "loss_fn": "ppo",
                "loss_fn_config": {"clip_low_threshold": 0.5},
            },
        }
    )
    for call in (binary, json_form):
        assert (call.loss_fn, dict(call.config), call.is_forward_only) == (
            "ppo",
            {"clip_low_threshold": 0.5},
            False,
        )
        assert len(call.data) == len(data)
        for ours, theirs in zip(call.data, data, strict=True):
            assert ours.input_ids.tolist() == theirs.model_input.to_ints()
            assert ours.targets.tolist() == list(theirs.loss_fn_inputs["target_tokens"].data)
            weights = np.asarray(theirs.loss_fn_inputs["weights"].data, np.float32)
            np.testing.assert_array_equal(ours.inputs["weights"], weights)


@given(st.lists(st.lists(FLOATS, max_size=5), max_size=4), st.dictionaries(st.text(), st.floats(-9, 9)))
def test_what_is_written_is_what_the_sdk_decodes_and_what_json_says(
    rows: list[list[float]], metrics: dict[str, float]
) -> None:
    content = write_forward_backward([np.asarray(row, np.float32) for row in rows], metrics)
    decoded = deserialize_forward_backward_output(content)
    assert decoded.metrics == metrics
    assert [list(output["logprobs"].data) for output in decoded.loss_fn_outputs] == rows
    said = forward_backward_json(content)
    assert said["metrics"] == metrics
    assert [output["logprobs"]["data"] for output in said["loss_fn_outputs"]] == rows


def test_samples_are_decoded_with_their_log_probs_and_stop_reasons() -> None:
    completions = [
        Completion(
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
            weights_versions=np.array([3, 3], np.int32),
            finish_reason=reason,
        )
        for reason in FinishReason
    ]
    prompt = np.array([np.nan, -1.5], np.float32)
    content = write_samples(completions, prompt)
    decoded = deserialize_sample_response(content)
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in decoded.sequences] == [
        ([5, 6], [-0.5, -0.25], reason.value) for reason in FinishReason
    ]
    assert decoded.prompt_logprobs == [None, -1.5]
    said = samples_json(content)
    assert [s["stop_reason"] for s in said["sequences"]] == [reason.value for reason in FinishReason]
    assert said["prompt_logprobs"] == [None, -1.5]
    assert samples_json(write_samples(completions, None))["prompt_logprobs"] is None


def inputs(**values: Any) -> Any:
    """Return what the SDK converts to its tensors."""
    return values


def datum(**values: Any) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs(**values))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xff", "the body is no ForwardBackwardRequest"),
        (encoded([datum(weights=[1.0] * 3)]), "data.0.loss_fn_inputs.target_tokens: a datum has"),
        (encoded([datum(target_tokens=[2, 3])]), "2 values for 3 input tokens"),
        (encoded([datum(target_tokens=[2, 3, -4])]), "target_tokens: a token id is out of range"),
        (encoded([datum(target_tokens=[2, 3, 4], weights=[1.0, np.nan, 1.0])]), "weights: a value is not"),
        (encoded([datum(target_tokens=np.ones((3, 2), np.int64))]), "several targets a position"),
        (
            encoded(
                [
                    sdk.Datum(
                        model_input=sdk.ModelInput(chunks=[sdk.ImageChunk(data=b"x", format="png")]),
                        loss_fn_inputs=inputs(target_tokens=[1]),
                    )
                ]
            ),
            "data.0.model_input.chunks.0: only chunks of token ids",
        ),
    ],
    ids=["garbage", "no targets", "short", "negative id", "nan", "two targets", "image"],
)
def test_a_body_that_cannot_be_used_is_refused_with_its_place(content: bytes, message: str) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        read_forward_backward(content)
    assert message in str(caught.value)
