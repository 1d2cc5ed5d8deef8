"""Rows to localization tasks: a tree for each, gold recomputed from its two versions, split by repository."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pilotage.datasets.localization_tasks import (
    LocalizationTask,
    localization_instruction,
    write_localization_task,
)
from pilotage.datasets.swe_smith.rows import Row
from pilotage.datasets.swe_smith.trees import NoTreeError, Tree, TreeSource, sources_of, two_versions
from pilotage.localization import EmptyLevel, Places, gold_places

_MAX_DATA_BYTES = 200_000


@dataclass(slots=True)
class TaskSummary:
    """What became of rows."""

    written: Counter[str] = field(default_factory=Counter[str])
    """Split -> tasks, those of an earlier run included."""
    drops: Counter[str] = field(default_factory=Counter[str])
    """Reason -> rows."""
    num_exact: int = 0
    """Tasks whose touched files are, by git's hash, those that the patch was made for."""
    differences: list[str] = field(default_factory=list[str])
    """One line for each task whose recomputed gold is not the row's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """How tasks are made."""

    held_out_fraction: float = 0.1
    """Share of the repositories, not of the rows: rows of one repository are too much alike."""
    seed: int = 0
    empty: EmptyLevel = "zero"


def split_of(repository: str, options: TaskOptions) -> str:
    """Return `train` or `held_out`; the same for every row of a repository, whatever else there is."""
    digest = hashlib.sha256(f"{options.seed}/{repository}".encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") / 2**64 < options.held_out_fraction else "train"


def _by_repository(rows: Sequence[Row]) -> Iterator[Row]:
    yield from sorted(rows, key=lambda row: (row.repository, row.instance_id))


def _is_kept(path: str, content: bytes) -> bool:
    """Leave out large data files: a sandbox holds its tree in memory, once for each rollout."""
    is_debris = path.endswith((".orig", ".rej"))  # a probe would take it for what a patch left
    return path.endswith(".py") or (len(content) <= _MAX_DATA_BYTES and not is_debris)


def _task(row: Row, tree: Tree, options: TaskOptions) -> LocalizationTask:
    """Return the task, its gold recomputed."""
    buggy, fixed = two_versions(row, tree)
    paths = sorted(row.patch.paths)
    gold = gold_places(sources_of(buggy, paths), sources_of(fixed, paths))
    if not gold.files:
        raise NoTreeError("the two versions do not differ in code")
    return LocalizationTask(
        name=row.instance_id,
        description=f"Find what has to change in {row.repository}",
        instruction=localization_instruction(row.issue),
        tree={path: content for path, content in buggy.items() if _is_kept(path, content)},
        gold=gold,
        empty=options.empty,
        metadata={
            "repository": row.repository,
            "commit": row.commit,
            "bug_kind": row.kind,
            "tree": tree.origin,
            "is_tree_exact": tree.is_exact,
        },
        agent_timeout_s=600.0,
    )


def write_swe_smith_tasks(
    out: Path,
    rows: Sequence[Row],
    trees: TreeSource,
    options: TaskOptions,
    *,
    on_row: Callable[[], None] = lambda: None,
) -> TaskSummary:
    """Write `out/train` and `out/held_out`; a task that is there is kept, so a killed run can be repeated.

    Args:
        on_row: called after each row.
    """
    summary = TaskSummary()
    for row in _by_repository(rows):
        split = split_of(row.repository, options)
        try:
            tree = trees.tree_of(row)
            task = _task(row, tree, options)
        except NoTreeError as error:
            summary.drops[str(error)] += 1
        else:
            directory = out / split / task.name
            if not directory.exists():
                write_localization_task(directory, task)
            summary.written[split] += 1
            summary.num_exact += tree.is_exact
            if task.gold != row.gold:
                summary.differences.append(_difference(row, task.gold))
        on_row()
    return summary


def _difference(row: Row, gold: Places) -> str:
    parts: list[str] = []
    for level in ("files", "modules", "functions"):
        theirs, ours = getattr(row.gold, level), getattr(gold, level)
        parts += [f"-{place}" for place in sorted(theirs - ours)] + [
            f"+{place}" for place in sorted(ours - theirs)
        ]
    return f"{row.instance_id}: {' '.join(parts)}"
