"""From finished rollouts to the rows of SkyRL's batch, with a ledger of every sampled token.

SkyRL compares the last rows of the trajectories of a prompt and gives every row of a trajectory its
advantage. It knows no reward that is missing, and trains a row that has no sibling on its bare reward.
Hence: a rollout without a reward, or outside the baseline, has no row; rows of a prompt that has fewer than
two of them are masked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotage.algorithms import to_samples
from pilotage.algorithms.credit import orphaned_tokens
from pilotage.algorithms.groups import FIRST_TOKEN, GROUP_TOO_SMALL, ORPHAN
from pilotage.errors import RewardError
from pilotage.integrations.skyrl.interface import GeneratorOutput, TrajectoryId
from pilotage.types import Ledger, Outcome, OutcomeRule, Rollout, Sample


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """SkyRL's batch while it is being built.

    Args:
        rules: what each outcome means.
        is_training: whether the rows are trained; those of an evaluation are only looked at.
    """

    rules: Mapping[Outcome, OutcomeRule]
    is_training: bool
    output: GeneratorOutput = field(default_factory=lambda: _empty())
    masked: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    sampled_tokens: int = 0
    trained_tokens: int = 0
    groups_too_small: int = 0

    def add_group(self, ids: Sequence[TrajectoryId], rollouts: Sequence[Rollout]) -> None:
        """Add the rollouts of one prompt, in order."""
        kept: list[tuple[TrajectoryId, Rollout]] = []
        for identity, rollout in zip(ids, rollouts, strict=True):
            self.dropped.update(rollout.discarded_tokens)
            self.sampled_tokens += rollout.trajectory.sampled_tokens + sum(rollout.discarded_tokens.values())
            if rollout.reward is None:
                self.dropped[rollout.outcome] += rollout.trajectory.sampled_tokens
            elif self.is_training and not self.rules[rollout.outcome].in_baseline:
                self.masked[rollout.outcome] += rollout.trajectory.sampled_tokens
            else:
                kept.append((identity, rollout))
        is_too_small = self.is_training and len(kept) < 2
        self.groups_too_small += is_too_small
        for identity, rollout in kept:
            if is_too_small:
                self.dropped[GROUP_TOO_SMALL] += rollout.trajectory.sampled_tokens
            self._add_rollout(identity, rollout, is_trained=not is_too_small)
        if self.is_training and not kept:
            # SkyRL's trainer wants every prompt that it asked for in the batch.
            self._add_rows(ids[0], rollouts[0], [], reward=0.0)

    def finished(self, rollouts: Sequence[Rollout]) -> GeneratorOutput:
        """Return the batch, with what is counted over all its rollouts.

        Raises:
            RewardError: an evaluation of which no rollout has a reward.
        """
        outcomes = Counter(rollout.outcome for rollout in rollouts)
        if not self.output["response_ids"]:
            said = ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.items())
            raise RewardError(
                f"no rollout of the evaluation has a reward ({said}); see the trials of these rollouts"
            )
        causes = Counter(cause for rollout in rollouts for cause in rollout.trajectory.branch_causes())
        metrics = self.output["rollout_metrics"]
        metrics |= {f"outcome/{outcome}": count for outcome, count in outcomes.items()}
        metrics |= {f"branch/{cause}": count for cause, count in causes.items()}
        metrics["reward/none_count"] = sum(rollout.reward is None for rollout in rollouts)
        if self.is_training:
            metrics["groups_too_small"] = self.groups_too_small
            metrics |= _counts(self._ledger())
        return self.output

    def _ledger(self) -> Ledger:
        return Ledger(
            sampled_tokens=self.sampled_tokens,
            trained_tokens=self.trained_tokens,
            masked_tokens=dict(+self.masked),
            dropped_tokens=dict(+self.dropped),
        )

    def _add_rollout(self, identity: TrajectoryId, rollout: Rollout, *, is_trained: bool) -> None:
        assert rollout.reward is not None
        trajectory = rollout.trajectory
        samples = to_samples(trajectory, sequence_id=rollout.id, group_id=rollout.group_id, advantage=0.0)
        self._add_rows(identity, rollout, samples, reward=rollout.reward.value, is_trained=is_trained)
        if is_trained:
            trained, orphaned = sum(sample.trained_tokens for sample in samples), orphaned_tokens(trajectory)
            self.trained_tokens += trained
            self.masked[ORPHAN] += orphaned
            self.masked[FIRST_TOKEN] += trajectory.sampled_tokens - orphaned - trained

    def _add_rows(
        self,
        identity: TrajectoryId,
        rollout: Rollout,
        samples: Sequence[Sample],
        *,
        reward: float,
        is_trained: bool = True,
    ) -> None:
        rows = [_row(sample, is_trained=is_trained) for sample in samples] or [_NOTHING_TRAINED]
        output = self.output
        for index, row in enumerate(rows):
            output["prompt_token_ids"].append(list(row.prompt_ids))
            output["response_ids"].append(list(row.response_ids))
            output["loss_masks"].append(list(row.loss_mask))
            output["rollout_logprobs"].append(list(row.logprobs))
            output["rewards"].append(reward)
            output["stop_reasons"].append(rollout.outcome.value)
            output["trajectory_ids"].append(identity)
            output["trajectory_generation_times"].append(rollout.timings_s.get("total", 0.0))
            output["is_last_step"].append(index == len(rows) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One branch: prompt and response together are its ids; the last three are aligned to the response."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]


_NOTHING_TRAINED = _Row(prompt_ids=(0,), response_ids=(0,), loss_mask=(0,), logprobs=(0.0,))
"""Stands for a rollout without a trained token, whose reward may count all the same."""


def _row(sample: Sample, *, is_trained: bool) -> _Row:
    """Cut a branch before its first trained token: what comes before needs no loss, so it is the prompt.

    Example (upper case is trained)     a b C D e F   ->   prompt a b   response C D e F   mask 1 1 0 1
    """
    first = int(np.argmax(sample.loss_mask))
    mask = sample.loss_mask[first:] & is_trained
    return _Row(
        prompt_ids=sample.token_ids[:first].tolist(),
        response_ids=sample.token_ids[first:].tolist(),
        loss_mask=mask.astype(int).tolist(),
        logprobs=sample.sampler_logprobs[first:].tolist(),
    )


def _counts(ledger: Ledger) -> dict[str, float]:
    reasons = {f"ledger/masked_tokens/{reason}": count for reason, count in ledger.masked_tokens.items()}
    reasons |= {f"ledger/dropped_tokens/{reason}": count for reason, count in ledger.dropped_tokens.items()}
    return {
        "ledger/sampled_tokens": ledger.sampled_tokens,
        "ledger/trained_tokens": ledger.trained_tokens,
        "ledger/masked_tokens": sum(ledger.masked_tokens.values()),
        "ledger/dropped_tokens": sum(ledger.dropped_tokens.values()),
        **reasons,
    }


def _empty() -> GeneratorOutput:
    return GeneratorOutput(
        prompt_token_ids=[],
        response_ids=[],
        rewards=[],
        loss_masks=[],
        stop_reasons=[],
        rollout_metrics={},
        rollout_logprobs=[],
        trajectory_ids=[],
        trajectory_generation_times=[],
        trajectory_time_splits=None,
        rollout_expert_indices=None,
        rollout_sample_support=None,
        is_last_step=[],
        env_metrics=None,
        pixel_values=None,
        image_grid_thw=None,
    )
