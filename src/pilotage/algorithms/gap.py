"""How far the trainer's log-probs lie from the sampler's, on the tokens that were sampled."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """With d = trainer - sampler log-prob of a sampled token, in nats."""

    mean: float
    """Mean |d|."""
    max: float
    """Largest |d|."""
    k3: float
    """Mean of exp(d) - d - 1: estimate of KL(sampler || trainer), never negative."""


def logprob_gap(
    trainer_logprobs: NDArray[np.float64], sampler_logprobs: NDArray[np.float64]
) -> LogprobGap | None:
    """Compare the log-probs of [n] sampled tokens; None where there is none.

    Source: the k3 estimator of J. Schulman, "Approximating KL divergence" (2020), with samples from the
    sampler.
    """
    if trainer_logprobs.size == 0:
        return None
    d = trainer_logprobs.astype(np.float64) - sampler_logprobs.astype(np.float64)
    magnitude = np.abs(d)
    return LogprobGap(
        mean=float(magnitude.mean()), max=float(magnitude.max()), k3=float((np.expm1(d) - d).mean())
    )
