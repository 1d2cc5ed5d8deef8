import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.algorithms.plain_losses import (
    Trained,
    as_tokens,
    counts_of,
    plain_gradient,
    plain_loss,
    random_sequences,
)

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


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    # ratios 5 and 2 with advantage -1: min(-5, -1.2) = -5, which the dual clip raises to -3; -2 stays
    tokens = tokens_of([0, 0, 0], [0, 0, 0], [-1, -1, 1])
    result = evaluate(tokens, np.log([5.0, 2.0, 1.1]), replace(WIDE, dual_clip=3.0))

    assert result.loss == pytest.approx((3 + 2 - 1.1) / 3)
    assert result.gradient_n.tolist() == pytest.approx([0, 2 / 3, -1.1 / 3])
    assert result.clipped_tokens == 1


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # ratios 1.5, 0.5, 1.1 weigh the log-probs with 1.2, 0.8, 1.1
    logprobs = np.array([-1.0, -2.0, -3.0])
    tokens = tokens_of([0, 0, 0], (logprobs - np.log([1.5, 0.5, 1.1])).tolist(), [1, -1, 2])
    result = evaluate(tokens, logprobs, replace(WIDE, policy_loss=PolicyLoss.CISPO))

    assert result.gradient_n.tolist() == pytest.approx([-1.2 / 3, 0.8 / 3, -2.2 / 3])
    assert result.loss == pytest.approx((1.2 * 1 - 0.8 * 2 + 2.2 * 3) / 3)
    assert result.clipped_tokens == 2


def test_an_upper_cap_alone_is_a_lower_clip_of_one() -> None:
    # cap 4: ratio 0.01 stays as it is, 9 becomes 4
    tokens = tokens_of([0, 0], [-1 - math.log(0.01), -1 - math.log(9)], [1, 1])
    config = replace(WIDE, policy_loss=PolicyLoss.CISPO, clip_low=1.0, clip_high=3.0)
    result = evaluate(tokens, np.array([-1.0, -1.0]), config)

    assert result.gradient_n.tolist() == pytest.approx([-0.01 / 2, -4 / 2])
    assert result.clipped_tokens == 1


def test_icepop_leaves_out_tokens_whose_ratio_is_outside_the_band() -> None:
    # ratios 1.5, 0.5, 1.1 and a band of 0.8 to 1.2
    logprobs = np.array([-1.0, -2.0, -3.0])
    tokens = tokens_of([0, 0, 0], (logprobs - np.log([1.5, 0.5, 1.1])).tolist(), [1, -1, 2])
    result = evaluate(tokens, logprobs, replace(WIDE, policy_loss=PolicyLoss.ICEPOP))

    assert result.gradient_n.tolist() == pytest.approx([0, 0, -2.2 / 3])
    assert result.clipped_tokens == 2


def test_a_rollout_is_weighted_by_the_product_of_its_ratios_truncated_or_left_out() -> None:
    # rollout 0: 1.5 x 1.6 = 2.4; rollout 1: 1.1 x 0.8 = 0.88; a cap of 2, no lower clip
    logprobs = np.full(4, -1.0)
    tokens = tokens_of([0, 0, 1, 1], (logprobs - np.log([1.5, 1.6, 1.1, 0.8])).tolist(), [1, 1, 1, 1])
    config = replace(WIDE, clip_low=1.0, clip_high=1.0, policy_loss=PolicyLoss.TIS_SEQUENCE)
    truncated = evaluate(tokens, logprobs, config)
    masked = evaluate(tokens, logprobs, replace(config, policy_loss=PolicyLoss.MIS_SEQUENCE))

    assert truncated.gradient_n.tolist() == pytest.approx([-2 / 4, -2 / 4, -0.88 / 4, -0.88 / 4])
    assert masked.gradient_n.tolist() == pytest.approx([0, 0, -0.88 / 4, -0.88 / 4])
    assert truncated.clipped_tokens == masked.clipped_tokens == 2


@pytest.mark.parametrize("policy", [PolicyLoss.TIS_SEQUENCE, PolicyLoss.MIS_SEQUENCE])
@pytest.mark.parametrize("drift", [-1.0, 1.0])
def test_the_product_of_a_long_rollout_does_not_overflow(policy: PolicyLoss, drift: float) -> None:
    tokens = tokens_of([0] * 2000, [-2.0] * 2000, [1.0] * 2000)  # e to the power of 2,000
    result = evaluate(tokens, np.full(2000, -2.0 + drift), replace(WIDE, policy_loss=policy))

    bound = 0.0 if policy is PolicyLoss.MIS_SEQUENCE else 1.2 if drift > 0 else 0.8
    assert result.gradient_n.tolist() == pytest.approx([-bound / 2000] * 2000)


@pytest.mark.parametrize("policy", sorted({*PolicyLoss} - {PolicyLoss.CROSS_ENTROPY}))
def test_on_policy_the_ratio_is_one_and_behaviour_is_not_read(policy: PolicyLoss) -> None:
    tokens = tokens_of([0, 0], [99.0, -99.0], [2, -1])
    result = evaluate(tokens, np.array([-1.0, -3.0]), replace(WIDE, policy_loss=policy, on_policy=True))

    mean = (2 - 1) / 2 / 2  # GSPO's one ratio hands each token the mean slope
    expected = [-mean, -mean] if policy is PolicyLoss.GSPO else [-2 / 2, 1 / 2]
    assert result.gradient_n.tolist() == pytest.approx(expected)
    assert result.clipped_tokens == 0


def test_a_sum_over_tokens_and_a_mean_over_rollouts_is_dr_grpo_of_length_one() -> None:
    # seq-mean-token-sum: (1 token x 2 + 3 tokens x 2) / 2 rollouts
    tokens = tokens_of([0, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2])
    config = replace(WIDE, reduction=Reduction.DR_GRPO, dr_grpo_tokens=1)

    assert evaluate(tokens, np.zeros(4), config).loss == pytest.approx(-(2 + 6) / 2)


@pytest.mark.parametrize("d", [2.7, -12.0, 25.0, -25.0])
def test_a_cap_of_ten_is_both_stock_clamps_of_k3(d: float) -> None:
    # stock: d to +-20, then exp(d) - d - 1 to +-10; all of these are over 10
    config = replace(WIDE, kl_coef=1.0, kl_cap=10.0)
    result = evaluate(tokens_of([0], [0.0], [0.0]), np.zeros(1), config, reference=np.array([d]))

    clamped = max(-20.0, min(20.0, d))
    assert result.kl_sum == min(10.0, math.exp(clamped) - clamped - 1) == 10.0
    assert result.gradient_n.tolist() == [0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip must be over 1"),
        ({"dual_clip": 3.0, "policy_loss": PolicyLoss.CISPO}, "cispo has no dual_clip"),
        ({"kl_cap": 0.0}, "kl_cap"),
        ({"dr_grpo_tokens": 0}, "dr_grpo_tokens"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_a_loss_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WIDE, **changes)


@pytest.mark.parametrize("policy", list(PolicyLoss))
@pytest.mark.parametrize("reduction", list(Reduction))
def test_nothing_to_train_is_a_loss_of_zero(policy: PolicyLoss, reduction: Reduction) -> None:
    config = replace(WIDE, policy_loss=policy, reduction=reduction)
    result = policy_loss(TrainedTokens.of([]), np.zeros(0), config, denominators=Denominators.of([]))
    assert (result.loss, result.gradient_n.size, result.clipped_tokens) == (0.0, 0, 0)


@st.composite
def configs(draw: st.DrawFn) -> LossConfig:
    policy = draw(st.sampled_from(list(PolicyLoss)))
    has_dual_clip = policy in (PolicyLoss.GRPO, PolicyLoss.GSPO) and draw(st.booleans())
    return LossConfig(
        policy_loss=policy,
        reduction=draw(st.sampled_from(list(Reduction))),
        clip_low=draw(st.sampled_from([3e-4, 0.2, 1.0])),
        clip_high=draw(st.sampled_from([4e-4, 0.28, 4.0])),
        dual_clip=1.5 if has_dual_clip else None,
        on_policy=draw(st.booleans()),
        kl_coef=draw(st.sampled_from([0.0, 0.3])),
        kl_cap=draw(st.sampled_from([None, 0.2])),
        dr_grpo_tokens=7,
    )


seeds = st.integers(0, 2**32 - 1)


@given(configs(), seeds)
def test_loss_and_gradient_are_those_of_plain_loops(config: LossConfig, seed: int) -> None:
    sequences = random_sequences(np.random.default_rng(seed))
    tokens, logprobs, reference = as_tokens(sequences)
    result = evaluate(tokens, logprobs, config, reference)

    assert result.loss == pytest.approx(plain_loss(sequences, config), rel=1e-12, abs=1e-12)
    assert result.gradient_n.tolist() == pytest.approx(plain_gradient(sequences, config), abs=1e-6, rel=1e-4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TrainedTokens, Floats, Floats, LossConfig]:
    tokens, logprobs, reference = as_tokens(random_sequences(np.random.default_rng(draw(seeds))))
    return tokens, logprobs, reference, draw(configs())


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


@given(configs(), seeds)
def test_two_ranks_that_know_the_counts_of_the_batch_add_up_to_it(config: LossConfig, seed: int) -> None:
    sequences = random_sequences(np.random.default_rng(seed))
    whole, counts = loss_of(sequences, config, counts_of(sequences)), counts_of(sequences)
    ranks = [sequences[::2], sequences[1::2]]
    parts = [loss_of(rank, config, counts) for rank in ranks if rank]

    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, abs=1e-12)
    sizes = np.cumsum([len(s.logprobs) for s in sequences])[:-1]
    expected = np.split(whole.gradient_n, sizes)
    together = np.concatenate([part.gradient_n for part in parts])
    np.testing.assert_allclose(together, np.concatenate(expected[::2] + expected[1::2]), atol=1e-12, rtol=0)


def loss_of(sequences: list[Trained], config: LossConfig, counts: Denominators) -> LossValue:
    tokens, logprobs, reference = as_tokens(sequences)
    return policy_loss(tokens, logprobs, config, denominators=counts, reference_logprobs_n=reference)


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
