"""Whether two sets of tasks share what they must not: a held-out score on trained tasks means nothing."""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pilotage.errors import TaskError
from pilotage.types import Task


def _issue_digest(task: Path) -> str:
    """Digest the issue's words, so that layout and letter case do not hide a copy."""
    words = re.findall(r"\w+", (task / "instruction.md").read_text(errors="replace").lower())
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def _marks(task: Task) -> Iterator[tuple[str, str]]:
    """Yield (what, value) pairs; two tasks that share one are the same task, or near it."""
    yield "directory", str(task.path)
    if (task.path / "instruction.md").is_file():
        yield "issue text", _issue_digest(task.path)
    path = task.path / "task.toml"
    try:
        settings = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    if name := settings.get("task", {}).get("name"):
        yield "name", str(name)
    if repository := settings.get("metadata", {}).get("repository"):
        yield "repository", str(repository)


def overlaps(train: Iterable[Task], held_out: Sequence[Task]) -> list[str]:
    """Return one line for each held-out task that shares directory, name, issue text or repository.

    Raises:
        TaskError: a task.toml is not TOML.
    """
    if not held_out:
        return []
    trained: dict[tuple[str, str], str] = {}
    for task in train:
        for mark in _marks(task):
            trained.setdefault(mark, task.id)
    found: list[str] = []
    for task in held_out:
        shared = next((mark for mark in _marks(task) if mark in trained), None)
        if shared is not None:
            found.append(f"{task.id} has the {shared[0]} of training task {trained[shared]}")
    return found
