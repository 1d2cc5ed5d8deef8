"""A localization task as a Harbor task directory.

    NAME/task.toml  instruction.md  environment/{Dockerfile,TREE}  tests/{test.sh,score.py,gold.json}
         solution/solve.sh

The agent sees the tree alone: no history, no diff, equal times. Gold lives in `tests/`, which Harbor uploads
after the agent has stopped, and in the oracle's `solution/`.
"""

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import tomli_w

from pilotage.errors import ConfigError
from pilotage.localization import EmptyLevel, Places, locations_of, scoring

type MetadataValue = str | int | float | bool | Sequence[str]

WORKDIR = "/workspace"
BUILD_FILES = frozenset({"Dockerfile", "docker-compose.yaml", ".dockerignore"})
"""Names that mean something to Harbor at the top of `environment/`; a tree's own are left out."""

_SCRIPTS = frozenset({"tests/test.sh", "solution/solve.sh"})
_TEST_SH = """#!/bin/bash
python3 -I -S /tests/score.py /tests/gold.json /logs/agent/locations.json /logs/verifier/reward.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizationTask:
    """One task, not yet on disk."""

    name: str
    """Of the directory; Harbor knows the task as `pilotage/NAME`."""
    description: str
    instruction: str
    """Must not name what it should not."""
    tree: Mapping[str, bytes]
    """Path -> content of what the agent sees."""
    gold: Places
    empty: EmptyLevel = "zero"
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict[str, MetadataValue])
    agent_timeout_s: float = 120.0


_INSTRUCTION = """The repository in the working directory has the problem that this report describes.

<issue>
{issue}
</issue>

Find the places in its code that have to change to solve the problem. Do not change anything yourself.

Hand in once, with the tool `localization_finish`: a list of `locations`, each with the `file`, relative to
the repository, and as far as they apply the `class_name` and the `function_name`. Name what has to change and
nothing else. If you have no such tool, write {{"locations": [...]}} as JSON to /logs/agent/locations.json.
"""


_ISSUE = re.compile(r"<issue>\n(.*)\n</issue>", re.DOTALL)


def issue_of(instruction: str) -> str:
    """Return the issue of an instruction; one that has no frame around it is all issue."""
    found = _ISSUE.search(instruction)
    return found.group(1) if found else instruction


def localization_instruction(issue: str) -> str:
    """Return what a general agent is told: the issue, and how to hand in."""
    return _INSTRUCTION.format(issue=issue.strip())


def write_files(directory: Path, files: Mapping[str, bytes], *, executable: Iterable[str] = ()) -> None:
    """Write path -> content below `directory`; those of `executable` may be run."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    for path in executable:
        (directory / path).chmod(0o755)


def dockerfile(paths: Iterable[str], *, setup: Sequence[str] = ()) -> str:
    """Return a Dockerfile that puts the tree into the workdir, and nothing else of `environment/`.

    Args:
        paths: of the tree's files.
        setup: shell commands that run before the tree is there.
    """
    tops = sorted({(path.partition("/")[0], "/" in path) for path in paths})
    copies = [
        f"COPY {orjson.dumps([name, f'{WORKDIR}/{name}' if is_directory else f'{WORKDIR}/']).decode()}"
        for name, is_directory in tops
    ]
    lines = ["FROM python:3.12-slim", f"WORKDIR {WORKDIR}", *(f"RUN {command}" for command in setup), *copies]
    return "\n".join(lines) + "\n"


def harbor_settings(
    name: str,
    description: str,
    metadata: Mapping[str, MetadataValue],
    *,
    agent_timeout_s: float,
    verifier_timeout_s: float = 60.0,
) -> str:
    """Return the text of a task.toml of Harbor's schema 1.4, for a sandbox without network."""
    return tomli_w.dumps(
        {
            "schema_version": "1.4",
            "task": {"name": f"pilotage/{name}", "description": description},
            "metadata": dict(metadata),
            "agent": {"timeout_sec": agent_timeout_s},
            "verifier": {"timeout_sec": verifier_timeout_s},
            "environment": {
                "workdir": WORKDIR,
                "network_mode": "no-network",
                "cpus": 1,
                "memory_mb": 1024,
            },
        }
    )


def _solve_sh(gold: Places) -> str:
    answer = orjson.dumps({"locations": locations_of(gold)}).decode()
    write = f"printf '%s\\n' {shlex.quote(answer)} > /logs/agent/locations.json"
    return f"#!/bin/bash\nmkdir -p /logs/agent\n{write}\n"


def write_localization_task(directory: Path, task: LocalizationTask) -> None:
    """Write the task; `directory` appears only when it is whole.

    Raises:
        ConfigError: `directory` exists, the issue is blank, or gold has no file or one outside the tree.
    """
    if not task.instruction.strip():
        raise ConfigError(f"task {task.name}: the issue text is blank")
    if not task.gold.files:
        raise ConfigError(f"task {task.name}: no gold file")
    if missing := sorted(task.gold.files - task.tree.keys()):
        raise ConfigError(f"task {task.name}: gold outside the tree: {missing[0]}")
    tree = {path: content for path, content in task.tree.items() if path not in BUILD_FILES}
    gold = task.gold.to_record() | {"empty": task.empty}
    files = {
        "task.toml": harbor_settings(
            task.name, task.description, task.metadata, agent_timeout_s=task.agent_timeout_s
        ).encode(),
        "instruction.md": task.instruction.encode(),
        "environment/Dockerfile": dockerfile(tree).encode(),
        **{f"environment/{path}": content for path, content in tree.items()},
        "tests/test.sh": _TEST_SH.encode(),
        "tests/score.py": Path(scoring.__file__).read_bytes(),
        "tests/gold.json": orjson.dumps(gold),
        "solution/solve.sh": _solve_sh(task.gold).encode(),
    }
    write_task_directory(directory, files)


def write_task_directory(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write a whole task directory at once, its scripts executable.

    Raises:
        ConfigError: `directory` exists.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already; two tasks share a name, or remove it")
    building = directory.with_name(f".{directory.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    write_files(building, files, executable=[name for name in files if name in _SCRIPTS])
    building.rename(directory)
