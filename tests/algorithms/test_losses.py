import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotage.algorithms import LossValue, TrainedTokens, logprob_gap, policy_loss
from pilotage.types import Denominators, LossConfig, PolicyLoss, Reduction, Sample

type Floats = NDArray[np.float64]

WIDE = LossConfig(policy_loss=PolicyLoss.GRPO, reduction=Reduction.TOKEN_MEAN, clip_low=0.2, clip_high=0.2)


def tokens_of(sequence: list[int], sampler: list[float], advantages: list[float]) -> TrainedTokens:
    return TrainedTokens(
        sequence_n=np.array(sequence, np.int64),
        sampler_logprobs_n=np.array(sampler),
        advantages_n=np.array(advantages),
    )


def evaluate(
    tokens: TrainedTokens, logprobs: Floats, config: LossConfig, reference: Floats | None = None
) -> LossValue:
    counts = Denominators(
        trained_tokens=tokens.sequence_n.size, num_sequences=int(np.unique(tokens.sequence_n).size)
    )
    return policy_loss(tokens, logprobs, config, denominators=counts, reference_logprobs_n=reference)


def test_grpo_clips_a_token_that_moved_too_far_in_the_direction_of_its_advantage() -> None:
    # ratios 1.5, 1.5, 0.5, 0.5 with advantages 1, -1, 1, -1 and a clip of 0.2
    tokens = tokens_of([0, 0, 0, 0], [0, 0, 0, 0], [1, -1, 1, -1])
    result = evaluate(tokens, np.log([1.5, 1.5, 0.5, 0.5]), WIDE)

    # objectives min(1.5, 1.2) = 1.2; min(-1.5, -1.2) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8
    assert result.loss == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)
    # clipped: the first and the last; elsewhere -A r / 4
    assert result.gradient_n.tolist() == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])
    assert result.clipped_tokens == 2


def test_gspo_takes_one_ratio_for_a_rollout_whatever_its_branches() -> None:
    # log-ratios 0.1 and 0.3 of rollout 0 have mean 0.2; rollout 1 has 0
    tokens = tokens_of([0, 0, 1], [-1, -1, -1], [1, 1, -1])
    config = replace(WIDE, policy_loss=PolicyLoss.GSPO, clip_high=0.5, reduction=Reduction.SEQUENCE_MEAN)
    result = evaluate(tokens, np.array([-0.9, -0.7, -1.0]), config)

    s = math.exp(0.2)
    assert result.loss == pytest.approx(-(s - 1) / 2)
    # each token of rollout 0: half of the ratio's slope, over two rollouts
    assert result.gradient_n.tolist() == pytest.approx([-s / 4, -s / 4, 0.5])


def test_gspo_clips_all_tokens_of_a_rollout_or_none() -> None:
    tokens = tokens_of([0, 0, 1], [0, 0, 0], [1, 1, 1])
    result = evaluate(tokens, np.array([1.0, -0.1, 0.0]), replace(WIDE, policy_loss=PolicyLoss.GSPO))

    # mean log-ratio 0.45 is above log 1.2, though one of the tokens fell
    assert result.gradient_n.tolist() == pytest.approx([0, 0, -1 / 3])
    assert result.clipped_tokens == 2


def test_a_long_answer_keeps_a_ratio_near_one_under_gspo() -> None:
    # 1000 tokens that each fell by 0.001: the product of ratios is 0.37, their geometric mean 0.999
    tokens = tokens_of([0] * 1000, [0.0] * 1000, [1.0] * 1000)
    config = replace(WIDE, policy_loss=PolicyLoss.GSPO, reduction=Reduction.SEQUENCE_MEAN)

    assert evaluate(tokens, np.full(1000, -0.001), config).loss == pytest.approx(-math.exp(-0.001))


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        (Reduction.TOKEN_MEAN, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        (Reduction.SEQUENCE_MEAN, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        (Reduction.DR_GRPO, [1 / 20, 1 / 20, 1 / 20, 1 / 20]),  # 2 rollouts x 10 tokens
    ],
)
def test_a_reduction_decides_how_much_each_token_counts(reduction: Reduction, weights: list[float]) -> None:
    tokens = tokens_of([0, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2])
    config = replace(WIDE, reduction=reduction, dr_grpo_tokens=10)
    result = evaluate(tokens, np.zeros(4), config)

    assert result.gradient_n.tolist() == pytest.approx([-2 * weight for weight in weights])
    assert result.loss == pytest.approx(-2 * sum(weights))


def test_cross_entropy_reads_neither_advantages_nor_ratios() -> None:
    tokens = tokens_of([0, 0], [5, 5], [-3, 9])
    result = evaluate(tokens, np.array([-1.0, -3.0]), replace(WIDE, policy_loss=PolicyLoss.CROSS_ENTROPY))

    assert result.loss == pytest.approx(2.0)
    assert result.gradient_n.tolist() == [-0.5, -0.5]
    assert result.clipped_tokens == 0


def test_kl_to_the_reference_is_added_with_its_coefficient() -> None:
    tokens = tokens_of([0], [-1.0], [0.0])
    result = evaluate(tokens, np.array([-1.0]), replace(WIDE, kl_coef=0.5), reference=np.array([-2.0]))

    k3 = math.exp(-1) - (-1) - 1  # d = reference - policy = -1
    assert result.loss == pytest.approx(0.5 * k3)
    assert result.kl_sum == pytest.approx(k3)
    assert result.gradient_n.tolist() == pytest.approx([0.5 * (1 - math.exp(-1))])


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        evaluate(tokens_of([0], [0.0], [0.0]), np.zeros(1), replace(WIDE, kl_coef=0.1))


@pytest.mark.parametrize("policy", list(PolicyLoss))
@pytest.mark.parametrize("reduction", list(Reduction))
def test_nothing_to_train_is_a_loss_of_zero(policy: PolicyLoss, reduction: Reduction) -> None:
    config = replace(WIDE, policy_loss=policy, reduction=reduction)
    result = policy_loss(TrainedTokens.of([]), np.zeros(0), config, denominators=Denominators.of([]))
    assert (result.loss, result.gradient_n.size, result.clipped_tokens) == (0.0, 0, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TrainedTokens, Floats, Floats, LossConfig]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 12))
    config = LossConfig(
        policy_loss=draw(st.sampled_from(list(PolicyLoss))),
        reduction=draw(st.sampled_from(list(Reduction))),
        clip_low=draw(st.sampled_from([3e-4, 0.2])),
        clip_high=draw(st.sampled_from([4e-4, 0.28])),
        kl_coef=draw(st.sampled_from([0.0, 0.3])),
        dr_grpo_tokens=7,
    )
    sequence = np.sort(rng.integers(0, 4, size))
    tokens = TrainedTokens(
        sequence_n=np.unique(sequence, return_inverse=True)[1].astype(np.int64),
        sampler_logprobs_n=-rng.exponential(1, size),
        advantages_n=rng.normal(size=size),
    )
    logprobs = tokens.sampler_logprobs_n + rng.normal(scale=0.3, size=size)
    return tokens, logprobs, logprobs + rng.normal(scale=0.3, size=size), config


@given(cases())
def test_the_gradient_is_the_slope_of_the_loss(
    case: tuple[TrainedTokens, Floats, Floats, LossConfig],
) -> None:
    tokens, logprobs, reference, config = case
    if config.policy_loss is PolicyLoss.CISPO:  # its ratio takes no gradient: a test of its own
        config = replace(config, policy_loss=PolicyLoss.GRPO)
    gradient = evaluate(tokens, logprobs, config, reference).gradient_n

    h = 1e-6  # a clip border lies within h of a random ratio about once in a million draws
    for index in range(logprobs.size):
        shift = np.zeros_like(logprobs)
        shift[index] = h
        above = evaluate(tokens, logprobs + shift, config, reference).loss
        below = evaluate(tokens, logprobs - shift, config, reference).loss
        assert (above - below) / (2 * h) == pytest.approx(gradient[index], abs=1e-6, rel=1e-4)


@given(cases())
def test_pieces_of_whole_rollouts_add_up_to_the_batch(
    case: tuple[TrainedTokens, Floats, Floats, LossConfig],
) -> None:
    tokens, logprobs, reference, config = case
    whole = evaluate(tokens, logprobs, config, reference)
    counts = Denominators(
        trained_tokens=tokens.sequence_n.size, num_sequences=int(np.unique(tokens.sequence_n).size)
    )
    loss, gradient = 0.0, np.zeros_like(logprobs)
    for number in np.unique(tokens.sequence_n):
        here = tokens.sequence_n == number
        piece = TrainedTokens(
            sequence_n=np.zeros(int(here.sum()), np.int64),
            sampler_logprobs_n=tokens.sampler_logprobs_n[here],
            advantages_n=tokens.advantages_n[here],
        )
        part = policy_loss(
            piece, logprobs[here], config, denominators=counts, reference_logprobs_n=reference[here]
        )
        loss += part.loss
        gradient[here] = part.gradient_n

    assert loss == pytest.approx(whole.loss, abs=1e-12)
    np.testing.assert_allclose(gradient, whole.gradient_n, atol=1e-12)


def sample(sequence_id: str, mask: list[bool]) -> Sample:
    trained = np.array(mask)
    size = trained.size
    return Sample(
        sequence_id=sequence_id,
        group_id="g",
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=trained,
        sampler_logprobs=np.where(trained, -np.arange(size), 0).astype(np.float32),
        advantages=np.where(trained, 2.0, 0).astype(np.float32),
        weights_versions=np.where(trained, 0, -1).astype(np.int32),
    )


def test_branches_of_a_rollout_are_one_sequence_and_masked_rows_count_nowhere() -> None:
    samples = [
        sample("a", [False, True, True]),
        sample("b", [False, True]),
        sample("a", [False, False, False, True]),
        sample("masked", [False, False]),
    ]

    assert Denominators.of(samples) == Denominators(trained_tokens=4, num_sequences=2)
    tokens = TrainedTokens.of(samples)
    assert tokens.sequence_n.tolist() == [0, 0, 1, 0]
    assert tokens.sampler_logprobs_n.tolist() == [-1, -2, -1, -3]
    assert tokens.advantages_n.tolist() == [2, 2, 2, 2]


def test_the_gap_is_measured_in_mean_maximum_and_k3() -> None:
    gap = logprob_gap(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]))

    assert gap is not None
    assert (gap.mean, gap.max) == (0.25, 0.5)
    assert gap.k3 == pytest.approx((math.exp(0.5) - 0.5 - 1) / 2)


def test_no_token_has_no_gap() -> None:
    assert logprob_gap(np.zeros(0), np.zeros(0)) is None
