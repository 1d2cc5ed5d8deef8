"""A run in numbers: reward by window, held-out evaluations, ledger, branches, where the rise comes from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotage.types import OUTCOME_RULES, Outcome

type Record = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMean:
    """Reward over consecutive steps."""

    first_step: int
    last_step: int
    mean: float
    """Mean of the steps' mean rewards."""
    rollouts: int
    """Rollouts with a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RiseShares:
    """A rise in mean reward, split exactly in two.

    Mean reward is p r, with p the share of rollouts that handed in properly and r the mean reward of
    those (others score 0). From p0 r0 to p1 r1 the change is (p1 - p0)(r0 + r1)/2 + (r1 - r0)(p0 + p1)/2.
    """

    repaired_hand_ins: float
    better_answers: float


def training_steps(records: Iterable[Record]) -> list[Record]:
    """Return the records of training steps that have a mean reward."""
    return [record for record in records if record["step"] > 0 and "reward/mean" in record]


def window_means(records: Sequence[Record], window: int) -> list[WindowMean]:
    """Return the means of steps 1..window, window+1..2 window, and so on; the last may be shorter."""
    steps = training_steps(records)
    windows: dict[int, list[Record]] = {}
    for record in steps:
        windows.setdefault((int(record["step"]) - 1) // window, []).append(record)
    return [
        WindowMean(
            first_step=int(part[0]["step"]),
            last_step=int(part[-1]["step"]),
            mean=float(np.mean([record["reward/mean"] for record in part])),
            rollouts=int(sum(record["reward/count"] for record in part)),
        )
        for part in windows.values()
    ]


def _proper_and_reward(steps: Sequence[Record]) -> tuple[float, float]:
    rollouts = sum(record["reward/count"] for record in steps)
    completed = sum(record["outcome/completed"] for record in steps)
    reward = sum(record["reward/mean"] * record["reward/count"] for record in steps)
    return completed / rollouts, reward / completed if completed else 0.0


def rise_shares(records: Sequence[Record], window: int) -> RiseShares | None:
    """Split the rise from the first to the last `window` steps; None where the run is too short."""
    steps = training_steps(records)
    if len(steps) < 2 * window:
        return None
    (p0, r0), (p1, r1) = _proper_and_reward(steps[:window]), _proper_and_reward(steps[-window:])
    return RiseShares(repaired_hand_ins=(p1 - p0) * (r0 + r1) / 2, better_answers=(r1 - r0) * (p0 + p1) / 2)


def totals(records: Sequence[Record], prefix: str) -> dict[str, int]:
    """Return the sums of all counts under `prefix` that are not 0, by the rest of their name."""
    sums: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(prefix):
                sums[name.removeprefix(prefix)] = sums.get(name.removeprefix(prefix), 0) + value
    return {name: int(total) for name, total in sorted(sums.items()) if total}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _window_table(records: Sequence[Record], window: int) -> list[str]:
    lines = [f"{'steps':>11}  {'mean reward':>11}  {'rollouts':>8}"]
    for part in window_means(records, window):
        steps = f"{part.first_step}-{part.last_step}"
        lines.append(f"{steps:>11}  {part.mean:>11.3f}  {part.rollouts:>8}")
    return lines


def _evaluation_lines(records: Sequence[Record]) -> list[str]:
    lines = ["held-out tasks, greedy:"]
    for record in records:
        if "eval/reward_mean" in record:
            interval = f" +- {record['eval/reward_ci95']:.3f}" if "eval/reward_ci95" in record else ""
            mean, count = record["eval/reward_mean"], record["eval/count"]
            lines.append(f"  after step {int(record['step']):>4}: {mean:.3f}{interval} ({count:.0f} tasks)")
    return lines if len(lines) > 1 else []


def _ledger_lines(records: Sequence[Record]) -> list[str]:
    # A step in which every rollout failed has tokens, though no reward.
    steps = [record for record in records if "ledger/sampled_tokens" in record]
    sums = {
        name: int(sum(record[f"ledger/{name}_tokens"] for record in steps))
        for name in ("sampled", "trained", "masked", "dropped")
    }
    reasons = totals(steps, "ledger/masked_tokens/") | totals(steps, "ledger/dropped_tokens/")
    return [
        f"tokens: sampled {sums['sampled']} = trained {sums['trained']} + masked {sums['masked']}"
        f" + dropped {sums['dropped']} ({_listed(reasons)})",
        f"branches: {_listed(totals(steps, 'branch/'))}; sampled tokens encoded again: 0, by construction",
        f"outcomes: {_listed(totals(steps, 'outcome/'))}",
    ]


def _policy_lines(records: Sequence[Record]) -> list[str]:
    steps = [record for record in training_steps(records) if "policy/logprob_gap_max" in record]
    if not steps:
        return []
    gap = max(record["policy/logprob_gap_max"] for record in steps)
    clip = float(np.mean([record["policy/clip_fraction"] for record in steps]))
    seconds = float(np.median([record["time/step_s"] for record in steps]))
    return [
        f"sampler/trainer log-prob gap: at most {gap:.2g} nats; clipped {clip:.1%} of tokens;"
        f" {seconds:.1f} s a step (median)"
    ]


_TIMES = {
    "rollouts": "time/rollouts_s",
    "training": "time/train_s",
    "publishing": "time/publish_s",
    "evaluation": "time/evaluation_s",
}


def _time_and_lag_lines(records: Sequence[Record]) -> list[str]:
    found = {name: [r[key] for r in records if key in r] for name, key in _TIMES.items()}
    medians = ", ".join(f"{name} {np.median(values):.2g} s" for name, values in found.items() if values)
    lag = [record["lag/mean_versions"] for record in records if "lag/mean_versions" in record]
    lines = [f"median times: {medians}"] if medians else []
    return [*lines, f"lag: {np.mean(lag):.2g} versions, at most {max(lag):.2g}"] if lag else lines


def _failure_lines(records: Sequence[Record]) -> list[str]:
    """Count what went wrong: rollouts without a reward by outcome, and signs of hacks."""
    steps = [record for record in records if record["step"] > 0]
    failed = {
        outcome: count
        for outcome, count in totals(steps, "outcome/").items()
        if not OUTCOME_RULES[Outcome(outcome)].has_reward
    }
    rollouts = sum(int(r.get("reward/count", 0) + r.get("reward/none_count", 0)) for r in steps)
    lines = [f"rollouts without a reward: {sum(failed.values())} of {rollouts} ({_listed(failed)})"]
    if any(name.startswith("hack/") for record in steps for name in record):
        lines.append(f"rollouts with signs of a hack: {_listed(totals(steps, 'hack/'))}")
    return lines


def format_comparison(runs: Mapping[str, Sequence[Record]], *, window: int) -> str:
    """Return the reward means of several runs side by side, and what each comes to held out."""
    width = max(11, *(len(name) for name in runs))
    means = {name: {m.first_step: m for m in window_means(records, window)} for name, records in runs.items()}
    starts = sorted({start for found in means.values() for start in found})
    lines = ["  ".join([f"{'steps':>11}", *(f"{name:>{width}}" for name in runs)])]

    def line(head: str, cells: Iterable[float | None]) -> str:
        shown = (f"{'-' if cell is None else f'{cell:.3f}':>{width}}" for cell in cells)
        return "  ".join([f"{head:>11}", *shown])

    for start in starts:
        found = [means[name].get(start) for name in runs]
        last = max(part.last_step for part in found if part is not None)
        lines.append(line(f"{start}-{last}", (None if part is None else part.mean for part in found)))
    held_out = {
        name: [record["eval/reward_mean"] for record in records if "eval/reward_mean" in record]
        for name, records in runs.items()
    }
    for head, index in (("held-out 0", 0), ("last", -1)):
        lines.append(line(head, (values[index] if values else None for values in held_out.values())))
    return "\n".join(lines)


def format_report(records: Sequence[Record], *, window: int) -> str:
    """Return the report of a run as text.

    Args:
        window: steps per row of the reward table.
    """
    if all(record["step"] == 0 for record in records):
        return "no finished step yet"
    if not training_steps(records):
        return "\n".join(["no step with a reward yet", *_failure_lines(records)])
    lines = [*_window_table(records, window), "", *_evaluation_lines(records)]
    shares = rise_shares(records, window)
    if shares is not None:
        lines.append(
            f"rise from the first {window} steps to the last {window}: "
            f"{shares.better_answers:+.3f} better answers, {shares.repaired_hand_ins:+.3f} repaired hand-ins"
        )
    details = (_ledger_lines, _failure_lines, _policy_lines, _time_and_lag_lines)
    return "\n".join([*lines, *(line for describe in details for line in describe(records))])
