"""Policy losses as functions of log-probs: value, exact gradient and clip fraction, in float64.

A trainer needs no loss of its own: it computes the log-probs of trained tokens, asks here for the loss and
its gradient with respect to them, and propagates that gradient into its weights. Which sampled token counts
how much is in `Denominators`, which count the whole batch, so that a batch can be taken in pieces. A piece
must hold all of a rollout, because GSPO's ratio is one number per rollout.

Nothing here knows how log-probs are computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotage.types import Denominators, LossConfig, PolicyLoss, Reduction, Sample

type _Floats = NDArray[np.float64]
type _Ints = NDArray[np.int64]


_WEIGHTED = frozenset({PolicyLoss.CISPO, PolicyLoss.ICEPOP, PolicyLoss.TIS_SEQUENCE, PolicyLoss.MIS_SEQUENCE})
_OF_ROLLOUTS = frozenset({PolicyLoss.TIS_SEQUENCE, PolicyLoss.MIS_SEQUENCE})
_MASKED = frozenset({PolicyLoss.ICEPOP, PolicyLoss.MIS_SEQUENCE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The n trained tokens of some whole rollouts, sample after sample."""

    sequence_n: _Ints
    """[n] which rollout, numbered from 0 in order of appearance."""
    sampler_logprobs_n: _Floats
    advantages_n: _Floats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "TrainedTokens":
        """Collect what the loss reads from samples that together hold whole rollouts."""
        numbers: dict[str, int] = {}
        sequence = [numbers.setdefault(sample.sequence_id, len(numbers)) for sample in samples]
        masks = [sample.loss_mask for sample in samples]
        return cls(
            sequence_n=np.repeat(np.array(sequence, np.int64), [int(mask.sum()) for mask in masks]),
            sampler_logprobs_n=_join(
                [sample.sampler_logprobs[mask] for sample, mask in zip(samples, masks, strict=True)]
            ),
            advantages_n=_join(
                [sample.advantages[mask] for sample, mask in zip(samples, masks, strict=True)]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossValue:
    """A loss, or the part of it that some rollouts contribute: parts add up."""

    loss: float
    gradient_n: _Floats
    """[n] derivative of the loss with respect to each trained token's log-prob."""
    clipped_tokens: int
    """Tokens whose gradient the clip removed, or, for CISPO, whose weight it changed; 0 for cross entropy."""
    kl_sum: float
    """Sum of the k3 estimate over tokens; 0 without a reference."""


def policy_loss(
    tokens: TrainedTokens,
    logprobs_n: _Floats,
    config: LossConfig,
    *,
    denominators: Denominators,
    reference_logprobs_n: _Floats | None = None,
) -> LossValue:
    """Evaluate the loss on the log-probs of trained tokens.

    With r the importance ratio (of the token, or, for GSPO, of the rollout: the geometric mean over its
    trained tokens), A the advantage and b(r) = r clipped to [1 - clip_low, 1 + clip_high], a token's
    objective is

        GRPO, GSPO      min(r A, b(r) A), and, with `dual_clip` c, at least c A where A < 0
        CISPO           stop-gradient(b(r)) A logprob
        IcePop          stop-gradient(r where b(r) = r, else 0) A logprob
        TIS, MIS        as CISPO and IcePop, with the product of a rollout's ratios for r
        cross entropy   logprob

    An upper-only cap M of the ratio, as CISPO and truncated importance sampling have it, is `clip_low = 1`
    (no lower clip, as a ratio is positive) with `clip_high = M - 1`. On-policy, r is 1 and its slope that of
    the log-prob.

    Args:
        tokens: what was sampled.
        logprobs_n: [n] log-probs under the weights that are trained.
        denominators: counts of the whole batch that these tokens are part of.
        reference_logprobs_n: [n] under the frozen reference; needed where `config.kl_coef` is not 0.

    Returns:
        The loss is `sum_n w_n (-objective_n + kl_coef k3_n)`, with the weights w of the reduction. An empty
        piece is 0.

    k3 is exact unless `kl_cap` is set. The stock service clamps its argument to +-20 and its value to +-10;
    k3 is never negative and is over 10 wherever its argument is out of +-20, so `kl_cap = 10` is both
    clamps. It is off by default because a capped token is one that drifted far and is no longer pulled back.

    Source: GRPO, the clipped token ratio of PPO, arXiv:1707.06347 eq. 7 (arXiv:2402.03300 eq. 3); dual clip,
    arXiv:1912.09729 eq. 5; GSPO, arXiv:2507.18071 eq. 5 to 7; CISPO, arXiv:2506.13585 section 3.1; IcePop,
    arXiv:2510.18855; truncated products of ratios, Ionides 2008, J. Comput. Graph. Stat. 17(2); Dr. GRPO,
    arXiv:2503.20783 section 3.2 (constant length); k3, arXiv:2402.03300 eq. 4.
    """
    weight_n = _weights(tokens, config, denominators)
    if config.policy_loss is PolicyLoss.CROSS_ENTROPY:
        loss, gradient_n, clipped = -float(weight_n @ logprobs_n), -weight_n, 0
    elif config.policy_loss in _WEIGHTED:
        loss, gradient_n, clipped = _weighted_loss(tokens, logprobs_n, config, weight_n)
    else:
        loss, gradient_n, clipped = _ratio_loss(tokens, logprobs_n, config, weight_n)
    kl_sum = 0.0
    if config.kl_coef:
        if reference_logprobs_n is None:
            raise ValueError("kl_coef is not 0, but there are no reference log-probs")
        k3_n, slope_n = _k3(reference_logprobs_n - logprobs_n, cap=config.kl_cap)
        kl_sum = float(k3_n.sum())
        loss += config.kl_coef * float(weight_n @ k3_n)
        gradient_n = gradient_n - config.kl_coef * weight_n * slope_n
    return LossValue(loss=loss, gradient_n=gradient_n, clipped_tokens=clipped, kl_sum=kl_sum)


def _weights(tokens: TrainedTokens, config: LossConfig, denominators: Denominators) -> _Floats:
    """Return [n] how much each token counts."""
    sequence_n = tokens.sequence_n
    if config.reduction is Reduction.SEQUENCE_MEAN:
        return 1.0 / (np.bincount(sequence_n)[sequence_n] * np.float64(denominators.num_sequences))
    count = denominators.trained_tokens
    if config.reduction is Reduction.DR_GRPO:
        count = denominators.num_sequences * config.dr_grpo_tokens
    return np.full(sequence_n.size, 1.0 / max(count, 1))


def _ratio_loss(
    tokens: TrainedTokens, logprobs_n: _Floats, config: LossConfig, weight_n: _Floats
) -> tuple[float, _Floats, int]:
    """Return loss, gradient and number of clipped tokens of the objectives that differentiate the ratio."""
    log_ratio_n = _log_ratio(tokens, logprobs_n, config)
    is_gspo = config.policy_loss is PolicyLoss.GSPO
    ratio_n = np.exp(_sequence_mean(log_ratio_n, tokens.sequence_n) if is_gspo else log_ratio_n)
    advantage_n = tokens.advantages_n
    bounded_n = np.clip(ratio_n, 1 - config.clip_low, 1 + config.clip_high)
    objective_n = np.minimum(ratio_n * advantage_n, bounded_n * advantage_n)
    is_clipped_n = np.where(
        advantage_n > 0,
        ratio_n > 1 + config.clip_high,
        (ratio_n < 1 - config.clip_low) & (advantage_n < 0),
    )
    if config.dual_clip is not None:
        is_dual_n = (advantage_n < 0) & (ratio_n > config.dual_clip)
        objective_n = np.where(is_dual_n, config.dual_clip * advantage_n, objective_n)
        is_clipped_n |= is_dual_n
    # d objective / d (log-ratio): the ratio times the advantage where the clip does not bind, else 0.
    slope_n = np.where(is_clipped_n, 0.0, -weight_n * advantage_n * ratio_n)
    gradient_n = _sequence_mean(slope_n, tokens.sequence_n) if is_gspo else slope_n
    return -float(weight_n @ objective_n), gradient_n, int(is_clipped_n.sum())


def _weighted_loss(
    tokens: TrainedTokens, logprobs_n: _Floats, config: LossConfig, weight_n: _Floats
) -> tuple[float, _Floats, int]:
    """Return the same of the objectives that weight a log-prob by a ratio without a gradient."""
    log_ratio_n = _log_ratio(tokens, logprobs_n, config)
    if config.policy_loss in _OF_ROLLOUTS:
        log_ratio_n = np.bincount(tokens.sequence_n, weights=log_ratio_n)[tokens.sequence_n]
    # Of a long rollout the product may be anything; the bounds are compared where nothing overflows.
    low = math.log1p(-config.clip_low) if config.clip_low < 1 else -math.inf
    bounded_n = np.clip(log_ratio_n, low, math.log1p(config.clip_high))
    is_outside_n = bounded_n != log_ratio_n
    ratio_n = np.exp(bounded_n)
    if config.policy_loss in _MASKED:
        ratio_n = np.where(is_outside_n, 0.0, ratio_n)
    gradient_n = -weight_n * ratio_n * tokens.advantages_n
    return float(gradient_n @ logprobs_n), gradient_n, int(is_outside_n.sum())


def _log_ratio(tokens: TrainedTokens, logprobs_n: _Floats, config: LossConfig) -> _Floats:
    return np.zeros_like(logprobs_n) if config.on_policy else logprobs_n - tokens.sampler_logprobs_n


def _k3(d_n: _Floats, *, cap: float | None) -> tuple[_Floats, _Floats]:
    """Return the k3 estimate for d = reference - policy log-prob, and its slope in d."""
    slope_n = np.expm1(d_n)
    k3_n = slope_n - d_n
    if cap is None:
        return k3_n, slope_n
    return np.minimum(k3_n, cap), np.where(k3_n > cap, 0.0, slope_n)


def _sequence_mean(values_n: _Floats, sequence_n: _Ints) -> _Floats:
    """Replace each value by the mean over its sequence."""
    sums = np.bincount(sequence_n, weights=values_n)
    return (sums / np.maximum(np.bincount(sequence_n), 1))[sequence_n]


def _join(parts: Sequence[NDArray[np.float32]]) -> _Floats:
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)
