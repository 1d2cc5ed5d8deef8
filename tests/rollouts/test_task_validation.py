"""What is said of task directories that cannot be run, before any of them is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rollouts.rig import write_task

from pilotage.errors import TaskError
from pilotage.rollouts.task_validation import check_tasks, task_complaint

pytestmark = pytest.mark.agents


def toml(old: str, new: str) -> Callable[[Path], object]:
    def change(task: Path) -> None:
        path = task / "task.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def nothing(task: Path) -> None:
    """Leave the task as it is."""


def broken_toml(task: Path) -> None:
    (task / "task.toml").write_text("x")


def without_tests(task: Path) -> None:
    (task / "tests" / "test.sh").unlink()


def blank(task: Path) -> None:
    (task / "instruction.md").write_text(" \n")


def without_environment(task: Path) -> None:
    shutil.rmtree(task / "environment")


def link(target: str) -> Callable[[Path], object]:
    return lambda task: (task / "environment" / "pkg" / "out").symlink_to(target)


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        toml("[environment]\n", '[environment]\nmemory = "8G"\n'),
        toml('schema_version = "1.4"', 'version = "1.0"'),
        link("mod.py"),
    ],
    ids=["current schema", "memory of an old schema", "old schema", "link inside"],
)
def test_a_task_that_can_be_run_has_no_complaint(change: Callable[[Path], object], tmp_path: Path) -> None:
    task = write_task(tmp_path)
    change(task.path)
    assert task_complaint(task.path) == ""
    check_tasks([task])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            toml("[environment]\n", '[environment]\nmemory = "8 potatoes"\n'),
            "task.toml: environment: Value error",
        ),
        (toml("30.0", '"x"'), "task.toml: verifier.timeout_sec: Input should be a valid number"),
        (toml("toy/", "no name/"), "task.toml: task.name: Value error, Package name must be"),
        (broken_toml, "Expected '=' after a key"),
        (without_tests, "does not contain tests/test.sh"),
        (blank, "instruction.md is blank"),
        (
            without_environment,
            "neither an environment/ directory nor a docker_image",
        ),
        (link("/etc/passwd"), "environment/pkg/out is a link that leads out of the task"),
        (link("../../../.."), "environment/pkg/out is a link that leads out of the task"),
    ],
)
def test_a_task_that_cannot_be_run_is_named_with_the_reason(
    change: Callable[[Path], object], complaint: str, tmp_path: Path
) -> None:
    good, bad = write_task(tmp_path, "good"), write_task(tmp_path, "bad")
    change(bad.path)
    with pytest.raises(TaskError) as caught:
        check_tasks([good, bad])
    message = str(caught.value)
    assert message.startswith(f"1 of 2 tasks cannot be used; {bad.path}: ")
    assert complaint in message
    assert "\n" not in message
