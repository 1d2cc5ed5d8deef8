"""Tasks that training and evaluation must not share."""

from pathlib import Path

import pytest

from pilotage.datasets import overlaps
from pilotage.errors import TaskError
from pilotage.types import Task


def write(root: Path, name: str, *, issue: str, repository: str = "", toml_name: str = "") -> Task:
    path = root / name
    path.mkdir(parents=True)
    text = f'[task]\nname = "{toml_name or name}"\n'
    (path / "task.toml").write_text(
        text + (f'[metadata]\nrepository = "{repository}"\n' if repository else "")
    )
    (path / "instruction.md").write_text(issue)
    return Task(id=f"set/{name}", path=path)


def test_other_tasks_do_not_overlap(tmp_path: Path) -> None:
    train = [write(tmp_path, "a", issue="One thing breaks.", repository="o/a")]
    held_out = [write(tmp_path, "b", issue="Another thing breaks.", repository="o/b")]
    assert overlaps(train, held_out) == []
    assert overlaps(train, []) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"issue": "one  THING breaks"}, "issue text"),
        ({"issue": "other", "toml_name": "a"}, "name"),
        ({"issue": "other", "repository": "o/a"}, "repository"),
    ],
)
def test_a_shared_issue_name_or_repository_is_found(
    tmp_path: Path, fields: dict[str, str], what: str
) -> None:
    train = [write(tmp_path, "a", issue="One thing breaks.", repository="o/a")]
    held_out = [write(tmp_path, "b", **fields)]
    assert overlaps(train, held_out) == [f"set/b has the {what} of training task set/a"]


def test_the_same_directory_is_found(tmp_path: Path) -> None:
    task = write(tmp_path, "a", issue="One thing breaks.")
    assert overlaps([task], [task]) == ["set/a has the directory of training task set/a"]


def test_a_broken_task_toml_is_named(tmp_path: Path) -> None:
    task = write(tmp_path, "a", issue="One thing breaks.")
    (task.path / "task.toml").write_text("x")
    with pytest.raises(TaskError, match=r"a/task.toml is not TOML: Expected '='"):
        overlaps([task], [task])
