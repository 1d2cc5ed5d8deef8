"""One flat record per step. A figure that was not measured is absent, never 0."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotage.algorithms import StepBatch
from pilotage.algorithms.hack_gauges import HackSign
from pilotage.types import (
    BranchCause,
    ForwardBackwardResult,
    Ledger,
    Outcome,
    Rollout,
    StepResult,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Wall seconds of a step's phases."""

    rollouts_s: float
    train_s: float
    publish_s: float


def _rewards(rollouts: Sequence[Rollout], outcome: Outcome | None = None) -> list[float]:
    return [
        rollout.reward.value
        for rollout in rollouts
        if rollout.reward is not None and outcome in (None, rollout.outcome)
    ]


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean reward, its parts, and how rollouts ended.

    `reward/mean_completed` with `outcome/completed` tells better answers from repaired hand-ins.
    """
    rewards, completed = _rewards(rollouts), _rewards(rollouts, Outcome.COMPLETED)
    record: dict[str, float] = {
        "reward/count": len(rewards),
        "reward/none_count": len(rollouts) - len(rewards),
    }
    if rewards:
        record["reward/mean"] = float(np.mean(rewards))
    if completed:
        record["reward/mean_completed"] = float(np.mean(completed))
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.reward.components if rollout.reward else {}).items():
            parts.setdefault(name, []).append(value)
    record |= {f"reward/{name}": float(np.mean(values)) for name, values in sorted(parts.items())}
    counts = Counter(rollout.outcome for rollout in rollouts)
    return record | {f"outcome/{outcome}": counts[outcome] for outcome in Outcome}


def _ledger_metrics(ledger: Ledger) -> dict[str, float]:
    record: dict[str, float] = {
        "ledger/sampled_tokens": ledger.sampled_tokens,
        "ledger/trained_tokens": ledger.trained_tokens,
        "ledger/masked_tokens": sum(ledger.masked_tokens.values()),
        "ledger/dropped_tokens": sum(ledger.dropped_tokens.values()),
    }
    record |= {f"ledger/masked_tokens/{reason}": n for reason, n in sorted(ledger.masked_tokens.items())}
    return record | {
        f"ledger/dropped_tokens/{reason}": n for reason, n in sorted(ledger.dropped_tokens.items())
    }


def _counter_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    causes = Counter(cause for rollout in rollouts for cause in rollout.trajectory.branch_causes())
    counters: Counter[str] = Counter()
    for rollout in rollouts:
        counters.update(rollout.counters)
    turns = [len(rollout.trajectory.turns) for rollout in rollouts]
    record: dict[str, float] = {f"branch/{cause}": causes[cause] for cause in BranchCause}
    record["rollout/retried"] = sum(rollout.attempt > 0 for rollout in rollouts)
    record["rollout/turns_mean"] = float(np.mean(turns))
    for sign in HackSign:
        del counters[f"hack_{sign}"]
        record[f"hack/{sign}"] = sum(rollout.counters.get(f"hack_{sign}", 0) > 0 for rollout in rollouts)
    return record | {f"proxy/{name}": count for name, count in sorted(counters.items())}


def _update_metrics(measured: ForwardBackwardResult, stepped: StepResult) -> dict[str, float]:
    record: Mapping[str, float | None] = {
        "policy/loss": measured.loss,
        "policy/logprob_gap_mean": measured.logprob_gap_mean,
        "policy/logprob_gap_max": measured.logprob_gap_max,
        "policy/gap_k3": measured.gap_k3,
        "policy/clip_fraction": measured.clip_fraction,
        "policy/kl_to_reference": measured.kl_to_reference,
        "policy/forwarded_tokens": measured.forwarded_tokens,
        "optim/grad_norm": stepped.grad_norm,
        "optim/lr": stepped.learning_rate,
    }
    return {name: value for name, value in record.items() if value is not None}


def _lag_metrics(batch: StepBatch, trainer_version: int) -> dict[str, float]:
    versions = [sample.weights_versions[sample.loss_mask] for sample in batch.samples]
    tokens = np.concatenate(versions) if versions else np.array([])
    if not tokens.size:
        return {}
    return {
        "lag/mean_versions": float(trainer_version - tokens.mean()),
        "lag/max_versions": float(trainer_version - tokens.min()),
    }


def _length_metrics(rollouts: Sequence[Rollout], batch: StepBatch) -> dict[str, float]:
    """Return how many tokens rollouts sampled: all of them, those trained and those that were not.

    Where rollouts are left out for being slow, long ones go first; these figures show it.
    """
    trained = {sample.sequence_id for sample in batch.samples}
    record: dict[str, float] = {}
    for name, chosen in (
        ("sampled", rollouts),
        ("trained", [rollout for rollout in rollouts if rollout.id in trained]),
        ("dropped", [rollout for rollout in rollouts if rollout.id not in trained]),
    ):
        sizes = [rollout.trajectory.sampled_tokens for rollout in chosen]
        if sizes:
            median, high = np.quantile(sizes, (0.5, 0.9))
            record |= {f"length/{name}_p50": float(median), f"length/{name}_p90": float(high)}
    return record


def step_metrics(
    rollouts: Sequence[Rollout],
    batch: StepBatch,
    *,
    update: tuple[ForwardBackwardResult, StepResult] | None,
    times: StepTimes,
    trainer_version: int,
) -> dict[str, float]:
    """Return the record of a training step, without its number and its evaluation.

    Args:
        update: None where no group gave a gradient.
        trainer_version: weights_version of the trainer when it computed the gradient.
    """
    record = reward_metrics(rollouts) | _ledger_metrics(batch.ledger) | _counter_metrics(rollouts)
    record |= {
        "group/count": batch.num_groups,
        "group/trained": batch.num_groups_trained,
        "group/too_small": batch.num_groups_too_small,
        "group/no_spread": batch.num_groups_without_spread,
        "group/filtered": batch.num_groups_filtered,
        "time/rollouts_s": times.rollouts_s,
        "time/train_s": times.train_s,
        "time/publish_s": times.publish_s,
    }
    record |= _lag_metrics(batch, trainer_version) | _length_metrics(rollouts, batch)
    return record | (_update_metrics(*update) if update is not None else {})


def evaluation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return mean, 95 % half-width (normal approximation over tasks) and counts of an evaluation."""
    rewards = np.array(_rewards(rollouts))
    record: dict[str, float] = {"eval/count": rewards.size, "eval/none_count": len(rollouts) - rewards.size}
    if rewards.size:
        record["eval/reward_mean"] = float(rewards.mean())
    if rewards.size > 1:
        record["eval/reward_ci95"] = float(1.96 * rewards.std(ddof=1) / np.sqrt(rewards.size))
    record["eval/completed"] = sum(rollout.outcome is Outcome.COMPLETED for rollout in rollouts)
    return record
