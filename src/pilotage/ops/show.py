"""A run's rollouts, and one rollout's tree, as text for a terminal."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pilotage.ops.report import Record
from pilotage.types import OUTCOME_RULES, Rollout, TokenIds, Turn

type Decode = Callable[[TokenIds], str]


def format_run(records: Sequence[Record], rollouts: Sequence[Path]) -> str:
    """List a run's steps and where its rollouts are."""
    lines = [f"{'step':>5}  {'reward':>7}  {'held-out':>8}  {'trained tokens':>14}  {'seconds':>7}"]
    for record in records:
        cells = [
            f"{int(record['step']):>5}",
            _cell(record, "reward/mean", 7, ".3f"),
            _cell(record, "eval/reward_mean", 8, ".3f"),
            _cell(record, "ledger/trained_tokens", 14, ".0f"),
            _cell(record, "time/step_s", 7, ".1f"),
        ]
        lines.append("  ".join(cells))
    ids = [path.name.removesuffix(".json.gz") for path in rollouts]
    listed = f"{ids[0]} ... {ids[-1]}" if ids else "none yet"
    return "\n".join([*lines, f"{len(ids)} rollouts: {listed}"])


def _cell(record: Record, name: str, width: int, form: str) -> str:
    return f"{record[name]:>{width}{form}}" if name in record else " " * (width - 1) + "-"


def format_rollout(rollout: Rollout, decode: Decode) -> str:
    """Show a rollout as the tree of its turns: context as it was read, what was sampled between >> and <<."""
    reward = "none" if rollout.reward is None else f"{rollout.reward.value:g} ({rollout.reward.source})"
    lines = [
        f"rollout {rollout.id}, task {rollout.task_id}, attempt {rollout.attempt}",
        f"outcome {rollout.outcome}, reward {reward}",
    ]
    if rollout.reward is not None and rollout.reward.components:
        parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward.components.items())
        lines.append(f"parts: {parts}")
    if rollout.failure is not None:
        lines.append(f"failure in {rollout.failure.where}: {rollout.failure.message}")
        lines.append(f"what to do: {rollout.failure.advice}")
    timings = ", ".join(f"{name} {seconds:.2f}" for name, seconds in rollout.timings_s.items())
    lines.append(f"seconds: {timings or 'not measured'}")
    depths: list[int] = []
    for index, turn in enumerate(rollout.trajectory.turns):
        is_branch = turn.branch_cause is not None
        depths.append(0 if turn.parent is None else depths[turn.parent] + is_branch)
        lines += ["", *_turn_lines(index, turn, decode, "  " * depths[index], _mask_of(rollout, turn))]
    return "\n".join(lines)


def _mask_of(rollout: Rollout, turn: Turn) -> str:
    """Say what becomes of the turn's sampled tokens, as far as the rollout alone decides it."""
    if not turn.is_delivered:
        return "mask 0 (orphan: never delivered)"
    if rollout.reward is None or not OUTCOME_RULES[rollout.outcome].is_trained:
        return f"mask 0 ({rollout.outcome})"
    return "mask 1"


def _turn_lines(index: int, turn: Turn, decode: Decode, indent: str, mask: str) -> list[str]:
    version = np.unique(turn.weights_versions).tolist()
    origin = "from the start" if turn.parent is None else f"after turn {turn.parent}"
    cause = f", branch: {turn.branch_cause}" if turn.branch_cause is not None else ""
    head = (
        f"turn {index} {origin}{cause}: context {turn.context_ids.size} tokens mask 0, sampled"
        f" {turn.completion_ids.size} tokens {mask}, mean log-prob {_mean(turn):.3f}, weights {version},"
        f" {turn.finish_reason}"
    )
    body = f"{decode(turn.context_ids)}>>{decode(turn.completion_ids)}<<"
    return [indent + head, *(f"{indent}| {line}" for line in body.splitlines())]


def _mean(turn: Turn) -> float:
    return float(turn.logprobs.mean()) if turn.logprobs.size else 0.0
