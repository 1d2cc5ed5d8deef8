"""Harbor tasks as a dataset that SkyRL's `PromptDataset` reads."""

import json
from collections.abc import Iterable
from pathlib import Path

from pilotage.datasets import load_tasks
from pilotage.integrations.skyrl.requests import TASK_COLUMN


def write_dataset(roots: Iterable[Path], file: Path) -> int:
    """Write one JSON line for each task of `roots`; returns how many.

    The prompt is the instruction, for SkyRL's own log and length filter: what the agent is told comes from
    the task's directory, whose absolute path the line bears.

    Raises:
        TaskError: a root does not exist or holds no usable task.
    """
    tasks = load_tasks(roots)
    with file.open("w", encoding="utf-8") as lines:
        for task in tasks:
            instruction = task.path / "instruction.md"
            text = instruction.read_text(encoding="utf-8") if instruction.is_file() else task.id
            line = {
                "prompt": [{"role": "user", "content": text}],
                "data_source": task.path.parent.name,
                TASK_COLUMN: str(task.path),
            }
            lines.write(json.dumps(line) + "\n")
    return len(tasks)
