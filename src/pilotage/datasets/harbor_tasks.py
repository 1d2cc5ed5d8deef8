"""Read directories of Harbor tasks."""

from collections.abc import Iterable
from pathlib import Path

from pilotage.errors import TaskError
from pilotage.types import Task


def _is_task(directory: Path) -> bool:
    return (directory / "task.toml").is_file() or (directory / "instruction.md").is_file()


def _checked(directory: Path) -> Path:
    steps = directory / "steps"
    for name in ("task.toml",) if steps.is_dir() else ("task.toml", "instruction.md", "tests/test.sh"):
        if not (directory / name).is_file():
            raise TaskError(
                f"{directory}: no {name}; a Harbor task needs task.toml, instruction.md and tests/test.sh"
            )
    return directory


def load_tasks(roots: Iterable[Path]) -> list[Task]:
    """Return the tasks of `roots`, each a task directory or a directory of them, sorted by id.

    Raises:
        TaskError: a root does not exist or holds no task, a task lacks a file, or two tasks share an id.
    """
    tasks: dict[str, Task] = {}
    for root in roots:
        root = root.expanduser().resolve()
        if not root.is_dir():
            raise TaskError(f"{root}: no such directory; give a Harbor task, or a directory of Harbor tasks")
        found = [root] if _is_task(root) else sorted(p for p in root.iterdir() if p.is_dir() and _is_task(p))
        if not found:
            raise TaskError(
                f"{root}: no Harbor task in it; expected subdirectories with task.toml and tests/test.sh"
            )
        for path in map(_checked, found):
            task = Task(id=f"{path.parent.name}/{path.name}", path=path)
            if task.id in tasks and tasks[task.id].path != path:
                raise TaskError(f"{path} and {tasks[task.id].path} share the id {task.id}; rename one")
            tasks[task.id] = task
    return [tasks[key] for key in sorted(tasks)]
