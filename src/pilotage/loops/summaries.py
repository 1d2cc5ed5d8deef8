"""What a list says of each rollout of a step, in a file beside the rollouts, so that a list opens none.

    rollouts/step-0001/ID.json.gz       the rollout, written first
    rollouts/step-0001/summaries.jsonl  then its line

Invariant: a line holds for one size of its rollout's file, and the newest of several lines holds. A kill
between the two files leaves a rollout without a line, and a reader opens that rollout itself.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError

from pilotage.errors import RunDirectoryError
from pilotage.files import append_line
from pilotage.loops.rollout_files import read_rollout
from pilotage.types import FinishReason, Outcome, Reward, Rollout, SamplingParams, Trajectory, Turn

SUMMARY_FILE = "summaries.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a list knows of one rollout; `fault` says why a file could not be read."""

    id: str
    folder: str
    task: str = ""
    group: str = ""
    attempt: int = 0
    outcome: str = ""
    reward: float | None = None
    reward_key: str = ""
    turns: int = 0
    branches: int = 0
    """Turns that started another branch."""
    tokens: int = 0
    """Context and sampled, each counted once."""
    sampled_tokens: int = 0
    tools: tuple[str, ...] = ()
    """Names of the tools that were called, sorted."""
    counters: dict[str, int]
    total_s: float | None = None
    started_at: float | None = None
    """Unix seconds of the first model call."""
    finished_at: float | None = None
    failure: str = ""
    fault: str = ""

    def skeleton(self) -> Rollout:
        """Return what its siblings' advantages depend on: its tokens are one turn that nobody received."""
        reward = None
        if self.reward is not None:
            reward = Reward(value=self.reward, key=self.reward_key, source="")
        return Rollout(
            id=self.id,
            group_id=self.group,
            task_id=self.task,
            attempt=self.attempt,
            outcome=Outcome(self.outcome),
            reward=reward,
            trajectory=Trajectory(turns=(_lost_turn(self.sampled_tokens),)),
        )


def _lost_turn(sampled_tokens: int) -> Turn:
    return Turn(
        parent=None,
        context_ids=np.zeros(0, np.int32),
        completion_ids=np.zeros(sampled_tokens, np.int32),
        logprobs=np.zeros(sampled_tokens, np.float32),
        weights_versions=np.zeros(sampled_tokens, np.int32),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        is_delivered=False,
        started_at=0.0,
        finished_at=0.0,
    )


_SUMMARY = TypeAdapter(Summary)


def summarise(folder: str, rollout: Rollout) -> Summary:
    """Return the summary of a rollout; tools of turns that nobody parsed are left out."""
    turns = rollout.trajectory.turns
    sampled = rollout.trajectory.sampled_tokens
    return Summary(
        id=rollout.id,
        folder=folder,
        task=rollout.task_id,
        group=rollout.group_id,
        attempt=rollout.attempt,
        outcome=rollout.outcome,
        reward=None if rollout.reward is None else rollout.reward.value,
        reward_key="" if rollout.reward is None else rollout.reward.key,
        turns=len(turns),
        branches=len(list(rollout.trajectory.branch_causes())),
        tokens=sampled + sum(turn.context_ids.size for turn in turns),
        sampled_tokens=sampled,
        tools=tuple(sorted({name for turn in turns for name in turn.called_tools or ()})),
        counters=dict(rollout.counters),
        total_s=rollout.timings_s.get("total"),
        started_at=min((turn.started_at for turn in turns), default=None),
        finished_at=max((turn.finished_at for turn in turns), default=None),
        failure="" if rollout.failure is None else rollout.failure.message,
    )


def append_summary(path: Path, rollout: Rollout) -> None:
    """Append the line of a rollout whose file is `path`, beside it."""
    record = {"file_bytes": path.stat().st_size, "summary": summarise(path.parent.name, rollout)}
    append_line(path.with_name(SUMMARY_FILE), orjson.dumps(record))


def complete_summaries(directory: Path) -> None:
    """Append the lines that a killed writer did not come to write; unreadable rollouts get none."""
    known = {(line.summary.id, line.file_bytes) for line in read_summaries(directory)[0]}
    for path in sorted(directory.glob("*.json.gz")):
        if (path.name.removesuffix(".json.gz"), path.stat().st_size) not in known:
            with contextlib.suppress(RunDirectoryError):
                append_summary(path, read_rollout(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """One line of the file."""

    file_bytes: int
    """Size of the rollout's file that it was written for."""
    summary: Summary


def read_summaries(directory: Path, *, start: int = 0) -> tuple[list[SummaryLine], int]:
    """Return the whole lines of a step's summaries from byte `start` on, and where the next one begins.

    A line that a kill tore, or that another version wrote, is left out; without the file there is none.
    """
    try:
        with (directory / SUMMARY_FILE).open("rb") as file:
            file.seek(start)
            whole, newline, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], 0
    found: list[SummaryLine] = []
    for line in whole.splitlines():
        try:
            record = orjson.loads(line)
            found.append(
                SummaryLine(
                    file_bytes=int(record["file_bytes"]), summary=_SUMMARY.validate_python(record["summary"])
                )
            )
        except (ValueError, KeyError, TypeError, ValidationError):
            continue
    return found, start + len(whole) + len(newline)
