"""Reading directories of Harbor tasks: what is found, and what is refused with one line."""

import re
from pathlib import Path

import pytest

from pilotage.datasets import load_tasks
from pilotage.errors import TaskError


def write_task(directory: Path, *, without: str = "") -> Path:
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if name != without:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("x")
    return directory


def refusal(*roots: Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_tasks(roots)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_directory_of_tasks_gives_its_tasks_sorted_by_id(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_task(tmp_path / "train" / name)
    (tmp_path / "train" / "notes").mkdir()
    (tmp_path / "train" / "README.md").touch()

    tasks = load_tasks([tmp_path / "train"])

    assert [task.id for task in tasks] == ["train/a", "train/b", "train/c"]
    assert [task.path for task in tasks] == [(tmp_path / "train" / name).resolve() for name in "abc"]


def test_a_task_directory_gives_that_task(tmp_path: Path) -> None:
    (task,) = load_tasks([write_task(tmp_path / "train" / "a")])
    assert task.id == "train/a"


def test_a_task_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    path = write_task(tmp_path / "train" / "a")
    assert len(load_tasks([path, tmp_path / "train", path / ".." / "a"])) == 1


def test_a_task_of_several_steps_needs_no_files_of_its_own_for_them(tmp_path: Path) -> None:
    path = write_task(tmp_path / "train" / "a", without="tests/test.sh")
    (path / "instruction.md").unlink()
    (path / "steps").mkdir()
    assert [task.id for task in load_tasks([path])] == ["train/a"]


def test_no_roots_give_no_tasks() -> None:
    assert load_tasks([]) == []


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").startswith(f"{tmp_path / 'none'}: no such directory; give ")


def test_a_directory_without_tasks_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").startswith(f"{tmp_path / 'empty'}: no Harbor task in it; expected ")


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_file_that_a_task_lacks_is_named_with_the_task(tmp_path: Path, missing: str) -> None:
    write_task(tmp_path / "train" / "good")
    bad = write_task(tmp_path / "train" / "bad", without=missing)
    assert refusal(tmp_path / "train").startswith(f"{bad}: no {missing}; a Harbor task needs ")


def test_two_tasks_with_one_id_are_both_named(tmp_path: Path) -> None:
    one, two = (write_task(tmp_path / side / "train" / "a") for side in ("left", "right"))
    assert re.fullmatch(
        f"{re.escape(str(two))} and {re.escape(str(one))} share the id train/a; rename one", refusal(one, two)
    )
