"""Score the methods without a model on localization tasks: the anchor lines of a reward curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotage.datasets.localization_tasks import issue_of
from pilotage.errors import TaskError
from pilotage.localization import (
    BASELINES,
    Bm25,
    EmptyLevel,
    Places,
    Score,
    functions_of,
    locate,
    places_of,
    score_locations,
    scoring,
)
from pilotage.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineScores:
    """One method's scores, one a task, in the order of the tasks."""

    method: str
    """Of `BASELINES`, or `gold`: what a perfect answer gets."""
    scores: tuple[Score, ...]

    @property
    def mean(self) -> Score:
        """The mean of each level."""
        count = len(self.scores)
        return Score(
            file_f1=sum(score.file_f1 for score in self.scores) / count,
            module_f1=sum(score.module_f1 for score in self.scores) / count,
            function_f1=sum(score.function_f1 for score in self.scores) / count,
        )


def read_gold(task: Path) -> tuple[Places, EmptyLevel]:
    """Read a localization task's gold.

    Raises:
        TaskError: there is none, or it is not of our form.
    """
    path = task / "tests" / "gold.json"
    try:
        return scoring.read_gold(path)
    except OSError:
        raise TaskError(f"{task}: no tests/gold.json; only localization tasks have baselines") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{path} is no gold of a localization task: {error!r}") from None


def read_tree(task: Path) -> dict[str, str]:
    """Return path -> source of the Python files that the agent of a task sees."""
    root = task / "environment"
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode(errors="replace")
        for path in sorted(root.rglob("*.py"))
        if path.is_file()
    }


def score_baselines(tasks: Sequence[Task], methods: Sequence[str] = BASELINES) -> list[BaselineScores]:
    """Run every method on every task; last is `gold`, the ceiling.

    Raises:
        TaskError: a task is no localization task.
    """
    scores: dict[str, list[Score]] = {method: [] for method in (*methods, "gold")}
    for task in tasks:
        gold, empty = read_gold(task.path)
        issue = issue_of((task.path / "instruction.md").read_text())
        functions = functions_of(read_tree(task.path))
        index = Bm25(functions)
        for method in methods:
            found = locate(method, functions, index, issue, seed=task.id)
            answer = places_of([function.location for function in found])
            scores[method].append(score_locations(answer, gold, empty=empty))
        scores["gold"].append(score_locations(gold, gold, empty=empty))
    return [BaselineScores(method=method, scores=tuple(found)) for method, found in scores.items()]
