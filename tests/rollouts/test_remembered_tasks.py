"""What Harbor finds in a task directory is computed once for each state of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harbor.models.task.file_filter import TaskFileFilter
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task
from harbor.publisher.packager import Packager
from tests.rollouts.rig import write_task

from pilotage.rollouts.remembered_tasks import Remembered, remember_tasks


@pytest.fixture
def remembering() -> Iterator[None]:
    checksum, content_hash = Task.checksum, Packager.compute_content_hash
    select, check = TaskFileFilter.select, TaskPaths.validate_input_tree
    remember_tasks()
    yield
    Task.checksum, Packager.compute_content_hash = checksum, staticmethod(content_hash)  # pyright: ignore
    TaskFileFilter.select, TaskPaths.validate_input_tree = select, check


def test_a_value_is_computed_again_only_when_the_directory_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "f.py"
    file.write_text("1")
    computed: list[int] = []
    remembered = Remembered[int]()

    def value() -> int:
        return remembered.value(tmp_path, lambda: computed.append(len(computed)) or len(computed))

    assert [value(), value()] == [1, 1]
    file.write_text("12")  # its size
    assert [value(), value()] == [2, 2]
    os.utime(file, ns=(0, 1))  # its time alone
    assert [value(), value()] == [3, 3]
    file.chmod(0o755)
    assert [value(), value()] == [4, 4]
    file.rename(file.with_name("g.py"))
    assert [value(), value()] == [5, 5]
    (tmp_path / "a" / "empty").mkdir()
    assert [value(), value()] == [6, 6]


@pytest.mark.filterwarnings("ignore:Task.checksum:DeprecationWarning")
@pytest.mark.usefixtures("remembering")
def test_what_is_remembered_is_harbors_own_digest(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    first = Packager.compute_content_hash(task.path)
    checksum = Task(task.path).checksum

    assert Packager.compute_content_hash(task.path) == first
    assert Task(task.path).checksum == checksum

    (task.path / "instruction.md").write_text("another issue\n")
    assert Packager.compute_content_hash(task.path)[0] != first[0]
    assert Task(task.path).checksum != checksum


@pytest.mark.usefixtures("remembering")
def test_the_selected_inputs_are_harbors_and_follow_the_directory(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    tests = task.path / "tests"

    def selected() -> list[str]:
        return [str(path) for path in Task(task.path).file_filter.select(tests).relative_paths]

    assert selected() == selected() == ["gold.json", "test.sh"]
    (tests / "more.py").write_text("")
    assert selected() == ["gold.json", "more.py", "test.sh"]
    (tests / ".harborignore").write_text("more.py\n")
    assert selected() == ["gold.json", "test.sh"]


@pytest.mark.usefixtures("remembering")
def test_a_link_that_comes_to_lead_outside_is_refused_at_once(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    inside, outside = task.path / "environment" / "data", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (task.path / "tests" / "data").symlink_to(inside)
    Task(task.path)
    Task(task.path)

    inside.rmdir()
    inside.symlink_to(outside)  # nothing in tests/ has changed

    with pytest.raises(ValueError, match="must stay within the task"):
        Task(task.path)
