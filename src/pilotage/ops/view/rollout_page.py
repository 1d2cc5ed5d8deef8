"""What the page of one rollout shows."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotage.loops.summaries import Summary
from pilotage.ops.view.charts import Span, waterfall
from pilotage.ops.view.conversation import TurnView, turn_views
from pilotage.ops.view.fates import RolloutFate, fate_of
from pilotage.ops.view.index import policy_text
from pilotage.ops.view.library import Run, rollout_id, step_of
from pilotage.ops.view.pages import run_row
from pilotage.ops.view.summaries import open_renderer
from pilotage.types import Rollout

_MOST_FILE_BYTES = 65_536
_MOST_FILES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView:
    """A text file that a trial left."""

    name: str
    text: str
    note: str
    """Why not all of it is shown; empty where it is."""


def rollout_context(run: Run, path: Path, rollout: Rollout, siblings: Sequence[Summary]) -> dict[str, object]:
    """Return everything about one rollout: linear in its tokens, but for the diffs of its branches.

    Args:
        path: its file.
        siblings: the rollouts of its group, itself among them.
    """
    folder = path.parent.name
    is_training = folder.startswith("step-")
    fate, why_not = _fate(run, rollout, siblings, is_training=is_training)
    renderer = open_renderer(policy_text(run))
    turns = [] if renderer is None else turn_views(rollout, renderer, fate)
    names = [rollout_id(file) for file in run.files(folder)]
    at = names.index(rollout_id(path)) if rollout_id(path) in names else 0
    record = run.record(step_of(folder))
    return {
        "run": run_row(run),
        "folder": folder,
        "step": step_of(folder),
        "is_training": is_training,
        "rollout": rollout,
        "turns": turns,
        "has_tokenizer": renderer is not None,
        "model": run.model(),
        "fate": fate,
        "has_gaps": fate is not None and any(turn.gaps_K is not None for turn in fate.turns),
        "why_not": why_not,
        "siblings": siblings,
        "previous": names[at - 1] if at else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
        "phases": waterfall(_phases(rollout)),
        "calls": waterfall(_calls(rollout, turns)),
        "gap_mean": record.get("policy/logprob_gap_mean"),
        "gap_max": record.get("policy/logprob_gap_max"),
        "files": list(_verifier_files(run, rollout)),
        "error_file": _read(run.path / "errors" / f"{rollout_id(path)}.error", "error file"),
    }


def _fate(
    run: Run, rollout: Rollout, siblings: Sequence[Summary], *, is_training: bool
) -> tuple[RolloutFate | None, str]:
    if not is_training:
        return None, "an evaluation trains nothing"
    settings = run.settings()
    if settings is None:
        return None, "this version cannot read the run's [loop] settings, so it cannot say what was trained"
    others = [item.skeleton() for item in siblings if item.id != rollout.id and not item.fault]
    trained = run.trained_with(rollout.group_id)
    logprobs = None if trained is None else run.directory.trainer_logprobs(trained.step, rollout.id)
    return fate_of(rollout, others, settings, step=trained, trainer_logprobs_n=logprobs), ""


def _phases(rollout: Rollout) -> list[Span]:
    """Return the phases end to end: how long each took is stored, not when it began."""
    spans: list[Span] = []
    start = 0.0
    for name, seconds in rollout.timings_s.items():
        if name != "total":
            spans.append(Span(label=name, kind="phase", start_s=start, end_s=start + seconds))
            start += seconds
    rest = rollout.timings_s.get("total", start) - start
    if rest > 0:
        spans.append(Span(label="rest", kind="rest", start_s=start, end_s=start + rest))
    return spans


def _calls(rollout: Rollout, turns: Sequence[TurnView]) -> list[Span]:
    """Return the model calls, and between two of them what the agent and its tools took."""
    spans: list[Span] = []
    tools = {turn.index: ", ".join(call.name for call in turn.calls) for turn in turns}
    previous: float | None = None
    for index, turn in enumerate(rollout.trajectory.turns):
        if previous is not None and turn.started_at > previous:
            label = tools.get(index - 1) or "agent"
            spans.append(Span(label=label, kind="agent", start_s=previous, end_s=turn.started_at))
        spans.append(
            Span(
                label=f"turn {index}",
                kind="sample",
                start_s=turn.started_at,
                end_s=turn.finished_at,
                href=f"#turn-{index}",
            )
        )
        previous = turn.finished_at
    return spans


def _verifier_files(run: Run, rollout: Rollout) -> Iterator[FileView]:
    """Yield what the verifier left where trial directories were kept; links are not followed."""
    configured = run.section("rollouts").get("trials_directory")
    trials = Path(configured) if isinstance(configured, str) else run.path / "trials"
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", rollout.id)
    name = re.compile(rf"{re.escape(readable)}-{rollout.attempt}-[0-9a-f]{{8}}")
    kept = [path for path in trials.glob("*") if name.fullmatch(path.name)] if trials.is_dir() else []
    count = 0
    for trial in sorted(kept):
        for directory, _, files in os.walk(trial / "verifier"):
            for file in sorted(files):
                path = Path(directory) / file
                view = _read(path, str(path.relative_to(trial)))
                if view is not None and count < _MOST_FILES:
                    count += 1
                    yield view


def _read(path: Path, name: str) -> FileView | None:
    """Read the beginning of a plain file; None where it is none: a link, a pipe, or not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        content = file.read(_MOST_FILE_BYTES)
    note = f"the first {_MOST_FILE_BYTES} of {found.st_size} bytes" if found.st_size > len(content) else ""
    return FileView(name=name, text=content.decode("utf-8", "replace"), note=note)
