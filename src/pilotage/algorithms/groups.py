"""From the finished rollouts of a step to one batch, and an account of every sampled token.

Invariant: the ledger balances whatever came in. A rollout without a reward, or a group that prefers
nothing, costs its own tokens and spoils nobody else's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms.advantages import group_relative, has_spread
from pilotage.algorithms.credit import orphaned_tokens, to_samples
from pilotage.types import Ledger, Outcome, OutcomeRule, Rollout, Sample

ORPHAN = "orphan"
"""Masked: the turn was sampled, and its client had gone away."""
FIRST_TOKEN = "first_token"
"""Masked: sampled from an empty context, so that nothing predicts it."""
GROUP_TOO_SMALL = "group_too_small"
"""Dropped: fewer than two rewards in the group's baseline."""
NO_SPREAD = "no_spread"
"""Dropped: the group's rewards are all equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """What a step trains on."""

    samples: tuple[Sample, ...]
    ledger: Ledger
    num_groups: int
    num_groups_trained: int
    """Groups that gave at least one sample."""
    num_groups_too_small: int
    num_groups_without_spread: int
    advantages: Mapping[str, float]
    """By rollout id, for every rollout that was compared with its siblings, trained or not."""


@dataclass(slots=True)
class _Account:
    """The batch while it is being built."""

    samples: list[Sample] = field(default_factory=list[Sample])
    advantages: dict[str, float] = field(default_factory=dict[str, float])
    masked: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    too_small: int = 0
    without_spread: int = 0


def build_batch(
    rollouts: Sequence[Rollout], rules: Mapping[Outcome, OutcomeRule], *, scale_by_std: bool = False
) -> StepBatch:
    """Compare rollouts within their groups and flatten those that are to be trained.

    Groups are told apart by `group_id`, never by their prompts. A baseline is a mean over rollouts, however
    many turns or branches each has. Tokens that give no gradient are not forwarded: a masked rollout has
    no sample, and is in the ledger only.

    Where several reasons hold for a rollout, the first of these is booked: no reward (dropped, under the
    outcome's name), an outcome that is not trained (masked, under its name), the group.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    account = _Account()
    for rollout in rollouts:
        account.dropped.update(rollout.discarded_tokens)
    for group in groups.values():
        _add_group(account, group, rules, scale_by_std=scale_by_std)
    return StepBatch(
        samples=tuple(account.samples),
        ledger=Ledger(
            sampled_tokens=sum(map(_sampled_tokens, rollouts)),
            trained_tokens=sum(sample.trained_tokens for sample in account.samples),
            masked_tokens=dict(+account.masked),
            dropped_tokens=dict(+account.dropped),
        ),
        num_groups=len(groups),
        num_groups_trained=len({sample.group_id for sample in account.samples}),
        num_groups_too_small=account.too_small,
        num_groups_without_spread=account.without_spread,
        advantages=account.advantages,
    )


def _sampled_tokens(rollout: Rollout) -> int:
    """Count what all attempts sampled."""
    return rollout.trajectory.sampled_tokens + sum(rollout.discarded_tokens.values())


def _add_group(
    account: _Account, group: Sequence[Rollout], rules: Mapping[Outcome, OutcomeRule], *, scale_by_std: bool
) -> None:
    """Book every rollout of one group."""
    scored: list[Rollout] = []
    rewards: list[float] = []
    for rollout in group:
        if rollout.reward is None:
            account.dropped[rollout.outcome] += rollout.trajectory.sampled_tokens
        else:
            scored.append(rollout)
            rewards.append(rollout.reward.value)
    if not scored:
        account.too_small += 1
        return
    rewards_G: NDArray[np.float64] = np.array(rewards, np.float64)
    in_baseline_G = np.array([rules[rollout.outcome].in_baseline for rollout in scored])
    reason = _group_fault(rewards_G[in_baseline_G])
    account.too_small += reason == GROUP_TOO_SMALL
    account.without_spread += reason == NO_SPREAD
    advantages_G = (
        np.zeros_like(rewards_G)
        if reason
        else group_relative(rewards_G, in_baseline_G=in_baseline_G, scale_by_std=scale_by_std)
    )
    for rollout, advantage in zip(scored, advantages_G.tolist(), strict=True):
        if reason is None:
            account.advantages[rollout.id] = advantage
        if not rules[rollout.outcome].is_trained:
            account.masked[rollout.outcome] += rollout.trajectory.sampled_tokens
        elif reason is not None:
            account.dropped[reason] += rollout.trajectory.sampled_tokens
        else:
            _train(account, rollout, advantage)


def _group_fault(baseline: NDArray[np.float64]) -> str | None:
    """Say why a group gives no gradient, or None."""
    if baseline.size < 2:
        return GROUP_TOO_SMALL
    return None if has_spread(baseline) else NO_SPREAD


def _train(account: _Account, rollout: Rollout, advantage: float) -> None:
    """Flatten one rollout, and book what of it cannot be trained."""
    trajectory = rollout.trajectory
    samples = to_samples(trajectory, sequence_id=rollout.id, group_id=rollout.group_id, advantage=advantage)
    account.samples += samples
    orphaned = orphaned_tokens(trajectory)
    trained = sum(sample.trained_tokens for sample in samples)
    account.masked[ORPHAN] += orphaned
    account.masked[FIRST_TOKEN] += trajectory.sampled_tokens - orphaned - trained
