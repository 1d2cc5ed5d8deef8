"""How good a rollout was, compared with its siblings."""

import numpy as np
from numpy.typing import NDArray

from pilotage.types.arrays import Mask


def group_relative(
    rewards_G: NDArray[np.float64],
    *,
    in_baseline_G: Mask | None = None,
    scale_by_std: bool = False,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Centre the rewards of one group on the mean of those that count in the baseline.

    Args:
        rewards_G: [G] one reward per rollout of the same task.
        in_baseline_G: [G] which rewards make the mean (and the deviation); None is all of them.
        scale_by_std: also divide by the population standard deviation of the baseline plus `eps`.

    Returns:
        [G] advantages, in the rewards' unit (unitless when `scale_by_std`). Those of the baseline sum to
        0 up to rounding; where all rewards are equal they are exactly 0.

    Raises:
        ValueError: nothing is in the baseline, or a reward is not finite.

    Source: GRPO, arXiv:2402.03300 section 4.1.2 with `scale_by_std`; Dr. GRPO, arXiv:2503.20783,
    without, which removes the bias towards groups of low variance.
    """
    baseline = rewards_G if in_baseline_G is None else rewards_G[in_baseline_G]
    if baseline.size == 0:
        raise ValueError("a baseline needs at least one reward")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards_G}")
    if (rewards_G == rewards_G[0]).all():  # rounding in the mean would leave ~1e-17
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - baseline.mean()
    return centred_G / (baseline.std() + eps) if scale_by_std else centred_G


def has_spread(rewards: NDArray[np.float64], *, rtol: float = 1e-6) -> bool:
    """Say whether rewards differ by more than rounding.

    Args:
        rewards: [n], n >= 1.
        rtol: smallest max - min that counts, as a share of the largest magnitude.

    Returns:
        True where the rewards carry a preference. The test is relative, so that it does not depend on the
        unit of the reward.

    Raises:
        ValueError: a reward is not finite.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards}")
    return bool(np.ptp(rewards) > rtol * np.abs(rewards).max())
