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
from pilotage.types import OUTCOME_RULES, Ledger, Outcome, OutcomeRule, Rollout, Sample

ORPHAN = "orphan"
"""Masked: the turn was sampled, and its client had gone away."""
FIRST_TOKEN = "first_token"
"""Masked: sampled from an empty context, so that nothing predicts it."""
GROUP_TOO_SMALL = "group_too_small"
"""Dropped: fewer than two rewards in the group's baseline."""
NO_SPREAD = "no_spread"
"""Dropped: the group's rewards are all equal."""
GROUP_REWARD = "group_reward"
"""Dropped: the mean of the group's baseline lies outside the recipe's limits."""
TOO_LONG = "too_long"
"""Masked: the rollout sampled more tokens than the recipe allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What a recipe says about how a step's rollouts become a batch."""

    outcomes: Mapping[Outcome, OutcomeRule] = field(default_factory=lambda: OUTCOME_RULES)
    scale_by_std: bool = False
    """Whether advantages are divided by their group's deviation."""
    max_rollout_tokens: int | None = None
    """A rollout that sampled more is masked, and out of its group's baseline."""
    min_group_reward: float | None = None
    """A group whose baseline has a smaller mean is dropped ..."""
    max_group_reward: float | None = None
    """... and so is one with a larger mean."""

    def is_too_long(self, rollout: Rollout) -> bool:
        """Whether the rollout sampled more tokens than it may; earlier attempts do not count."""
        limit = self.max_rollout_tokens
        return limit is not None and rollout.trajectory.sampled_tokens > limit

    def is_in_baseline(self, rollout: Rollout) -> bool:
        """Whether the reward of a rollout that has one counts in its group's mean."""
        return self.outcomes[rollout.outcome].in_baseline and not self.is_too_long(rollout)

    def group_fault(self, baseline: NDArray[np.float64]) -> str | None:
        """Say why a group gives no gradient, or None.

        Args:
            baseline: [n] the rewards that count in its mean.
        """
        if baseline.size < 2:
            return GROUP_TOO_SMALL
        if not has_spread(baseline):
            return NO_SPREAD
        low, high = self.min_group_reward, self.max_group_reward
        mean = float(baseline.mean())
        is_outside = (low is not None and mean < low) or (high is not None and mean > high)
        return GROUP_REWARD if is_outside else None


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
    num_groups_filtered: int
    """Groups whose mean reward is outside the recipe's limits."""
    advantages: Mapping[str, float]
    """By rollout id, for every rollout that was compared with its siblings, trained or not."""


@dataclass(slots=True)
class _Account:
    """The batch while it is being built."""

    samples: list[Sample] = field(default_factory=list[Sample])
    advantages: dict[str, float] = field(default_factory=dict[str, float])
    masked: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    """Groups without a gradient, by reason."""


def build_batch(rollouts: Sequence[Rollout], rules: BatchRules) -> StepBatch:
    """Compare rollouts within their groups and flatten those that are to be trained.

    Groups are told apart by `group_id`, never by their prompts. A baseline is a mean over rollouts, however
    many turns or branches each has. Tokens that give no gradient are not forwarded: a masked rollout has
    no sample, and is in the ledger only.

    Where several reasons hold for a rollout, the first of these is booked: no reward (dropped, under the
    outcome's name), an outcome that is not trained (masked, under its name), its length (masked), the group.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    account = _Account()
    for rollout in rollouts:
        account.dropped.update(rollout.discarded_tokens)
    for group in groups.values():
        _add_group(account, group, rules)
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
        num_groups_too_small=account.faults[GROUP_TOO_SMALL],
        num_groups_without_spread=account.faults[NO_SPREAD],
        num_groups_filtered=account.faults[GROUP_REWARD],
        advantages=account.advantages,
    )


def _sampled_tokens(rollout: Rollout) -> int:
    """Count what all attempts sampled."""
    return rollout.trajectory.sampled_tokens + sum(rollout.discarded_tokens.values())


def _add_group(account: _Account, group: Sequence[Rollout], rules: BatchRules) -> None:
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
        account.faults[GROUP_TOO_SMALL] += 1
        return
    rewards_G: NDArray[np.float64] = np.array(rewards, np.float64)
    in_baseline_G = np.array([rules.is_in_baseline(rollout) for rollout in scored])
    fault = rules.group_fault(rewards_G[in_baseline_G])
    if fault is not None:
        account.faults[fault] += 1
        advantages_G = np.zeros_like(rewards_G)
    else:
        advantages_G = group_relative(rewards_G, in_baseline_G=in_baseline_G, scale_by_std=rules.scale_by_std)
    for rollout, advantage in zip(scored, advantages_G.tolist(), strict=True):
        if fault is None:
            account.advantages[rollout.id] = advantage
        if not rules.outcomes[rollout.outcome].is_trained:
            account.masked[rollout.outcome] += rollout.trajectory.sampled_tokens
        elif rules.is_too_long(rollout):
            account.masked[TOO_LONG] += rollout.trajectory.sampled_tokens
        elif fault is not None:
            account.dropped[fault] += rollout.trajectory.sampled_tokens
        else:
            _train(account, rollout, advantage)


def _train(account: _Account, rollout: Rollout, advantage: float) -> None:
    """Flatten one rollout, and book what of it cannot be trained."""
    trajectory = rollout.trajectory
    samples = to_samples(trajectory, sequence_id=rollout.id, group_id=rollout.group_id, advantage=advantage)
    account.samples += samples
    orphaned = orphaned_tokens(trajectory)
    trained = sum(sample.trained_tokens for sample in samples)
    account.masked[ORPHAN] += orphaned
    account.masked[FIRST_TOKEN] += trajectory.sampled_tokens - orphaned - trained
