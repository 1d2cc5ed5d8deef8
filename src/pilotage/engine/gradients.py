"""From log-probs to gradients and figures: what every trainer does alike, however it holds its weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotage.algorithms import TrainedTokens, logprob_gap, policy_loss
from pilotage.errors import TrainerError
from pilotage.types import Denominators, ForwardBackwardResult, LossConfig, Sample

type _Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class Totals:
    """What the micro-batches of one call add up to."""

    loss: float = 0.0
    clipped_tokens: int = 0
    kl_sum: float = 0.0
    trainer_logprobs: list[_Floats] = field(default_factory=list[_Floats])
    sampler_logprobs: list[_Floats] = field(default_factory=list[_Floats])

    @classmethod
    def of(cls, parts: Iterable["Totals"]) -> "Totals":
        """Add up what several ranks counted."""
        total = cls()
        for part in parts:
            total.loss += part.loss
            total.clipped_tokens += part.clipped_tokens
            total.kl_sum += part.kl_sum
            total.trainer_logprobs += part.trainer_logprobs
            total.sampler_logprobs += part.sampler_logprobs
        return total


def propagate(
    logprobs_n: Tensor,
    samples: Sequence[Sample],
    loss: LossConfig,
    *,
    denominators: Denominators,
    reference_logprobs_n: _Floats | None,
    totals: Totals,
) -> None:
    """Evaluate the loss of whole rollouts, propagate its gradient back, and count it.

    Args:
        logprobs_n: [n] of the trained tokens, sample after sample, with their graph.
        denominators: counts of the whole batch that the samples are part of.
    """
    tokens = TrainedTokens.of(samples)
    values = to_numpy(logprobs_n)
    result = policy_loss(
        tokens, values, loss, denominators=denominators, reference_logprobs_n=reference_logprobs_n
    )
    logprobs_n.backward(torch.from_numpy(result.gradient_n).to(logprobs_n))
    totals.loss += result.loss
    totals.clipped_tokens += result.clipped_tokens
    totals.kl_sum += result.kl_sum
    totals.trainer_logprobs.append(values)
    totals.sampler_logprobs.append(tokens.sampler_logprobs_n)


def summarise(
    totals: Totals,
    loss: LossConfig,
    counts: Denominators,
    *,
    forwarded_tokens: int,
    trainer_logprobs_n: NDArray[np.float32],
) -> ForwardBackwardResult:
    """Turn sums into the figures of the samples that were given.

    Args:
        trainer_logprobs_n: [n] in the order of these samples.
    """
    tokens = counts.trained_tokens
    gap = None
    if tokens and loss.reads_sampler_logprobs:
        gap = logprob_gap(np.concatenate(totals.trainer_logprobs), np.concatenate(totals.sampler_logprobs))
    return ForwardBackwardResult(
        loss=totals.loss,
        trained_tokens=tokens,
        forwarded_tokens=forwarded_tokens,
        num_sequences=counts.num_sequences,
        logprob_gap_mean=None if gap is None else gap.mean,
        logprob_gap_max=None if gap is None else gap.max,
        gap_k3=None if gap is None else gap.k3,
        clip_fraction=None if gap is None else totals.clipped_tokens / tokens,
        kl_to_reference=totals.kl_sum / tokens if loss.kl_coef and tokens else None,
        trainer_logprobs_n=trainer_logprobs_n,
    )


def require_applicable(norm: float) -> None:
    """Refuse a gradient that would spoil the weights.

    Raises:
        TrainerError: its norm is not finite.
    """
    if not np.isfinite(norm):
        raise TrainerError(
            f"the gradient's norm is {norm}; nothing was applied. Lower the learning rate, or resume"
            " from the last checkpoint"
        )


def to_numpy(values: Tensor) -> _Floats:
    """Return a tensor's values in float64, without its graph."""
    return values.detach().double().cpu().numpy()
