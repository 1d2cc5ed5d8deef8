import math
import pickle
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.errors import InvalidBodyError
from pilotage.types import (
    AdamParams,
    Completion,
    Denominators,
    FinishReason,
    ForwardBackwardResult,
    LossConfig,
    PolicyLoss,
    Reduction,
    Sample,
    SamplingParams,
    StepResult,
    token_ids,
)
from pilotage.wire.frames import Tree, decode_frame, encode_frame
from pilotage.wire.records import pack_result, record_from_json, record_to_json, unpack_result
from pilotage.wire.samples import (
    Body,
    pack_completion,
    pack_forward_request,
    pack_logprobs,
    pack_sample_request,
    pack_samples,
    unpack_completion,
    unpack_forward_request,
    unpack_logprobs,
    unpack_sample_request,
    unpack_samples,
)


def sent(body: Body) -> Tree:
    return decode_frame(encode_frame(body))


def random_bits(rng: np.random.Generator, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Any finite float32, subnormals and minus zero included."""
    values = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(-0.0))


def random_sample(rng: np.random.Generator, *, is_referenced: bool) -> Sample:
    size = int(rng.integers(1, 9))
    mask = rng.random(size) < 0.5
    mask[0] = False
    zero = np.float32(0)
    return Sample(
        sequence_id=f"rollout-{rng.integers(3)}",
        group_id="g\u00e9",
        token_ids=rng.integers(0, 2**31, size).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, random_bits(rng, size), zero),
        advantages=np.where(mask, random_bits(rng, size), zero),
        weights_versions=np.where(mask, rng.integers(-1, 2**31, size), -1).astype(np.int32),
        reference_logprobs=np.where(mask, random_bits(rng, size), zero) if is_referenced else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_referenced = draw(st.booleans())
    samples = [random_sample(rng, is_referenced=is_referenced) for _ in range(draw(st.integers(0, 5)))]
    return [*samples, small_sample()] if not is_referenced else [*samples, referenced(small_sample())]


def small_sample(name: str = "a") -> Sample:
    """Three tokens, the last two of them trained."""
    return Sample(
        sequence_id=name,
        group_id="g",
        token_ids=token_ids([5, 6, 7]),
        loss_mask=np.array([False, True, True]),
        sampler_logprobs=np.array([0, -1, -2], np.float32),
        advantages=np.array([0, 0.5, 0.5], np.float32),
        weights_versions=token_ids([-1, 3, 4]),
    )


def referenced(sample: Sample) -> Sample:
    return replace(sample, reference_logprobs=np.where(sample.loss_mask, np.float32(-3), np.float32(0)))


losses = st.builds(
    LossConfig,
    policy_loss=st.sampled_from([PolicyLoss.GRPO, PolicyLoss.GSPO]),
    reduction=st.sampled_from(list(Reduction)),
    clip_low=st.floats(1e-9, 1),
    clip_high=st.floats(1e-9, 1e38),
    dual_clip=st.none() | st.floats(1.01, 10),
    kl_coef=st.floats(0, 1),
    kl_cap=st.none() | st.just(10.0),
    temperature=st.floats(0.1, 2),
    dr_grpo_tokens=st.integers(1, 2**40),
)


@given(batches(), losses, st.none() | st.integers(0, 2**50))
def test_a_batch_crosses_bit_for_bit(samples: list[Sample], loss: LossConfig, more: int | None) -> None:
    own = Denominators.of(samples)
    counts = None
    if more is not None:
        counts = Denominators(
            trained_tokens=own.trained_tokens + more, num_sequences=own.num_sequences + more
        )
    crossed, crossed_loss, crossed_counts = unpack_samples(sent(pack_samples(samples, loss, counts)))

    assert (crossed_loss, crossed_counts) == (loss, counts)
    assert len(crossed) == len(samples)
    for one, other in zip(samples, crossed, strict=True):
        assert (one.sequence_id, one.group_id) == (other.sequence_id, other.group_id)
        for name in ("token_ids", "loss_mask", "sampler_logprobs", "advantages", "weights_versions"):
            before, after = getattr(one, name), getattr(other, name)
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes(), name
        assert _bits(one.reference_logprobs) == _bits(other.reference_logprobs)


def _bits(array: Any) -> bytes | None:
    return None if array is None else array.tobytes()


def test_only_trained_tokens_carry_what_the_loss_reads() -> None:
    body = pack_samples([small_sample("a"), small_sample("b")], LossConfig(), None)

    assert body["lengths"].tolist() == [3, 3]  # pyright: ignore
    assert body["token_ids"].tolist() == [5, 6, 7, 5, 6, 7]  # pyright: ignore
    assert body["sampler_logprobs"].tolist() == [-1, -2, -1, -2]  # pyright: ignore
    assert body["weights_versions"].tolist() == [3, 4, 3, 4]  # pyright: ignore
    assert body["sequence_ids"] == ["a", "b"]
    assert "denominators" not in body


@pytest.mark.parametrize(
    "loss", [LossConfig(on_policy=True), LossConfig(policy_loss=PolicyLoss.CROSS_ENTROPY)]
)
def test_behaviour_that_is_not_read_is_not_sent(loss: LossConfig) -> None:
    body = pack_samples([small_sample()], loss, None)
    assert "sampler_logprobs" not in body

    [crossed], _, _ = unpack_samples(sent(body))
    assert crossed.sampler_logprobs.tolist() == [0, 0, 0]

    with pytest.raises(InvalidBodyError, match="does not read them"):
        unpack_samples(sent({**body, "sampler_logprobs": np.zeros(2, np.float32)}))


def test_reference_log_probs_are_all_there_or_none() -> None:
    with pytest.raises(ValueError, match="1 of 2 samples bring reference log-probs"):
        pack_samples([small_sample(), referenced(small_sample("b"))], LossConfig(), None)


F32, I32 = np.float32, np.int32
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"lengths": np.array([2], I32)}, "token_ids", "expected 2 entries, got 3"),
    ({"lengths": np.array([3, 0], I32)}, "lengths.1", "at least one token"),
    ({"lengths": np.array([3], np.int64)}, "lengths", "int32"),
    ({"lengths": [3]}, "lengths", "a list of 1"),
    ({"lengths": None}, "lengths", "missing"),
    ({"token_ids": np.array([5, -1, 7], I32)}, "token_ids.1", "at least 0"),
    ({"token_ids": np.array([[5, 6, 7]], I32)}, "token_ids", "one-dimensional"),
    ({"loss_mask": np.array([True, True, True])}, "loss_mask.0", "first token"),
    ({"loss_mask": np.zeros(3, np.bool_)}, "loss_mask", "nothing to compute"),
    ({"advantages": np.array([1], F32)}, "advantages", "expected 2 entries"),
    ({"advantages": np.array([1, np.nan], F32)}, "advantages.1", "not finite"),
    ({"sampler_logprobs": np.array([-np.inf, 0], F32)}, "sampler_logprobs.0", "not finite"),
    ({"sampler_logprobs": None}, "sampler_logprobs", "set loss.on_policy"),
    ({"reference_logprobs": np.zeros(3, F32)}, "reference_logprobs", "expected 2 entries"),
    ({"weights_versions": np.array([0, -2], I32)}, "weights_versions.1", "at least 0"),
    ({"sequence_ids": ["a", "b"]}, "sequence_ids", "a list of 1 strings"),
    ({"group_ids": [3]}, "group_ids.0", "a string"),
    ({"loss": None}, "loss", "required"),
    ({"loss": 3}, "loss", "an object"),
    ({"loss": {"clip_lo": 0.2}}, "loss.clip_lo", "unknown key"),
    ({"loss": {"clip_low": "0.2"}}, "loss.clip_low", "number"),
    ({"loss": {"clip_low": 7}}, "loss", "clip_low in (0, 1]"),
    ({"loss": {"policy_loss": "ppo"}}, "loss.policy_loss", "grpo"),
    ({"loss": {"kl_coef": np.zeros(1)}}, "", "not JSON"),
    ({"denominators": {"trained_tokens": 5}}, "denominators.num_sequences", "Field required"),
    (
        {"denominators": {"trained_tokens": 1, "num_sequences": 1}},
        "denominators.trained_tokens",
        "alone has 2",
    ),
    ({"denominators": {"trained_tokens": -1, "num_sequences": 1}}, "denominators", "negative"),
    ({"logprobs": np.zeros(2, F32)}, "logprobs", "unknown key"),
]


@pytest.mark.parametrize(("changes", "path", "reason"), FAULTS)
def test_a_batch_that_is_wrong_is_refused_with_path_and_reason(
    changes: dict[str, Any], path: str, reason: str
) -> None:
    body = pack_samples([small_sample()], LossConfig(), None)
    with pytest.raises(InvalidBodyError) as caught:
        unpack_samples(sent({**body, **changes}))
    assert caught.value.path == path
    assert reason in str(caught.value)


def test_keys_of_the_caller_start_with_x_and_are_not_read() -> None:
    body = pack_samples([small_sample()], LossConfig(), None)
    assert len(unpack_samples(sent({**body, "x-note": "mine"}))[0]) == 1


@pytest.mark.parametrize("tree", [None, 3, [], "text", np.zeros(2)])
def test_a_body_that_is_no_object_is_refused(tree: Any) -> None:
    with pytest.raises(InvalidBodyError, match="expected an object"):
        unpack_samples(sent(tree))


def test_an_error_of_a_body_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidBodyError("a.0", "wrong")))
    assert (error.path, str(error)) == ("a.0", "a.0: wrong")


# --- forward ---


def test_a_request_to_score_carries_tokens_mask_and_temperature() -> None:
    body = pack_forward_request([small_sample(), small_sample("b")], temperature=0.7)
    assert sorted(body) == ["lengths", "loss_mask", "temperature", "token_ids"]

    samples, temperature = unpack_forward_request(sent(body))
    assert temperature == 0.7
    assert [s.token_ids.tolist() for s in samples] == [[5, 6, 7], [5, 6, 7]]
    assert [s.loss_mask.tolist() for s in samples] == [[False, True, True]] * 2
    assert len({s.sequence_id for s in samples}) == 2

    for wrong in (0.0, -1.0, None, "1"):
        with pytest.raises(InvalidBodyError) as caught:
            unpack_forward_request(sent({**body, "temperature": wrong}))
        assert caught.value.path == "temperature"


@given(st.lists(st.integers(1, 5), max_size=5), st.integers(0, 2**32 - 1))
def test_log_probs_cross_bit_for_bit(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = [random_bits(rng, size) for size in sizes]
    crossed = unpack_logprobs(sent(pack_logprobs(logprobs)))

    assert [array.tobytes() for array in crossed] == [array.tobytes() for array in logprobs]


# --- sample ---

sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 99),
    max_tokens=st.integers(1, 10**6),
    seed=st.none() | st.integers(0, 2**62),
)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), sampling, st.text(), st.integers(0, 999))
def test_a_sample_call_crosses_whole(
    ids: list[int], params: SamplingParams, session_id: str, turn_index: int
) -> None:
    body = pack_sample_request(token_ids(ids), params, session_id=session_id, turn_index=turn_index)
    request = unpack_sample_request(sent(body))

    assert request.prompt_ids.tolist() == ids
    assert (request.params, request.session_id, request.turn_index) == (params, session_id, turn_index)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"prompt_ids": np.zeros(0, I32)}, "prompt_ids"),
        ({"prompt_ids": np.array([3, -4], I32)}, "prompt_ids.1"),
        ({"params": {"temperature": 99}}, "params"),
        ({"params": {"best_of": 2}}, "params.best_of"),
        ({"turn_index": -1}, "turn_index"),
        ({"session_id": None}, "session_id"),
        ({"n": 2}, "n"),
    ],
)
def test_a_sample_call_that_is_wrong_is_refused(changes: dict[str, Any], path: str) -> None:
    body = pack_sample_request(token_ids([1]), SamplingParams(), session_id="s", turn_index=0)
    with pytest.raises(InvalidBodyError) as caught:
        unpack_sample_request(sent({**body, **changes}))
    assert caught.value.path == path


@given(st.integers(0, 8), st.sampled_from(list(FinishReason)), st.integers(0, 2**32 - 1))
def test_a_completion_crosses_bit_for_bit(size: int, reason: FinishReason, seed: int) -> None:
    rng = np.random.default_rng(seed)
    completion = Completion(
        token_ids=rng.integers(0, 2**31, size).astype(np.int32),
        logprobs=random_bits(rng, size),
        weights_versions=rng.integers(0, 9, size).astype(np.int32),
        finish_reason=reason,
    )
    crossed = unpack_completion(sent(pack_completion(completion)))

    assert crossed.finish_reason is reason
    for name in ("token_ids", "logprobs", "weights_versions"):
        assert getattr(crossed, name).tobytes() == getattr(completion, name).tobytes()


def test_a_finish_reason_that_does_not_exist_is_refused() -> None:
    completion = Completion(
        token_ids=token_ids([1]),
        logprobs=np.zeros(1, np.float32),
        weights_versions=token_ids([0]),
        finish_reason=FinishReason.STOP,
    )
    with pytest.raises(InvalidBodyError, match="expected one of stop, length, got 'tool'"):
        unpack_completion(sent({**pack_completion(completion), "finish_reason": "tool"}))


# --- records ---

FIGURES = ForwardBackwardResult(
    loss=-0.1,
    trained_tokens=7,
    forwarded_tokens=20,
    num_sequences=2,
    logprob_gap_mean=1e-9,
    logprob_gap_max=None,
    gap_k3=0.1 + 0.2,
    clip_fraction=0.0,
    trainer_logprobs_n=np.array([-0.1, -2, -3e-8, 0, -1, -1, -20], np.float32),
)


@pytest.mark.parametrize(
    "record", [StepResult(grad_norm=1 / 3, learning_rate=1e-6, num_backwards=2), AdamParams(beta2=0.95)]
)
def test_settings_and_figures_cross_exactly(record: StepResult | AdamParams) -> None:
    assert record_from_json(type(record), record_to_json(record)) == record


def test_a_result_crosses_exactly_with_or_without_log_probs() -> None:
    crossed = unpack_result(sent(pack_result(FIGURES)))
    assert crossed == FIGURES
    np.testing.assert_array_equal(crossed.trainer_logprobs_n, FIGURES.trainer_logprobs_n)
    assert unpack_result(sent(pack_result(replace(FIGURES, trainer_logprobs_n=None)))) == FIGURES


def test_a_loss_that_overflowed_is_seen_on_the_other_side() -> None:
    logprobs = np.full(7, np.nan, np.float32)
    crossed = unpack_result(
        sent(pack_result(replace(FIGURES, loss=math.nan, gap_k3=math.inf, trainer_logprobs_n=logprobs)))
    )
    assert math.isnan(crossed.loss)
    assert crossed.gap_k3 == math.inf
    np.testing.assert_array_equal(crossed.trainer_logprobs_n, logprobs)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"trainer_logprobs": np.zeros(6, np.float32)}, "trainer_logprobs"),
        ({"trainer_logprobs": np.zeros(7)}, "trainer_logprobs"),
        ({"figures": None}, "figures"),
        ({"figures": {"loss": 1.0}}, "figures.trained_tokens"),
        ({"gap": 1}, "gap"),
    ],
)
def test_a_result_that_is_wrong_is_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        unpack_result(sent({**pack_result(FIGURES), **change}))
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"", ""),
        (b"[]", ""),
        (b'{"grad_norm": 1, "learning_rate": 1}', "num_backwards"),
        (b'{"grad_norm": 1, "learning_rate": 1, "num_backwards": 1, "lr": 1}', "lr"),
        (b'{"grad_norm": [], "learning_rate": 1, "num_backwards": 1}', "grad_norm"),
    ],
)
def test_a_record_that_is_wrong_is_refused(body: bytes, path: str) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        record_from_json(StepResult, body)
    assert caught.value.path == path


def test_a_record_is_a_json_object_of_all_its_fields() -> None:
    assert orjson.loads(record_to_json(AdamParams())) == asdict(AdamParams())
