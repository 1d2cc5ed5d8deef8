"""Whether a task directory can be run, asked of Harbor itself before the first rollout.

What Harbor would only stumble over in the middle of a run is looked for here too: a blank instruction, no
environment, and links that lead out of the task.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pilotage.errors import TaskError
from pilotage.rollouts.third_party import prepare
from pilotage.types import Task


def task_complaint(directory: Path) -> str:
    """Return in one line why Harbor refuses a task directory; empty where it takes it."""
    prepare()
    from harbor.models.task.task import Task as HarborTask
    from pydantic import ValidationError

    try:
        task = HarborTask(directory)
    except ValidationError as error:
        first = error.errors()[0]
        return f"task.toml: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, RuntimeError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    if not task.has_steps and not task.instruction.strip():
        return "instruction.md is blank"
    if not task.config.environment.docker_image and not task.paths.environment_dir.is_dir():
        return "neither an environment/ directory nor a docker_image"
    leaving = _leaving_link(directory.resolve())
    return f"{leaving} is a link that leads out of the task" if leaving else ""


def _leaving_link(root: Path) -> str:
    """Return the first link whose target is outside `root`, relative to it; empty where there is none."""
    for folder, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                return path.relative_to(root).as_posix()
    return ""


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise TaskError where Harbor refuses a task; the message counts them and explains the first."""
    complaints = [(task, complaint) for task in tasks if (complaint := task_complaint(task.path))]
    if complaints:
        task, complaint = complaints[0]
        raise TaskError(f"{len(complaints)} of {len(tasks)} tasks cannot be used; {task.path}: {complaint}")
