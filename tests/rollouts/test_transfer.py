"""Copies in and out of a root directory that a hostile program has prepared."""

import os
from pathlib import Path

import pytest

from pilotage.rollouts import transfer
from pilotage.rollouts.transfer import TransferError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    (path / "logs").mkdir(parents=True)
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "shadow").write_text("secret")
    return path


def test_a_whole_tree_arrives_with_its_bytes_and_modes(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "fixture.bin").write_bytes(bytes(range(256)))  # R17
    (source / "test.sh").write_text("#!/bin/sh\n")
    (source / "test.sh").chmod(0o755)

    transfer.write_tree(root, "/tests", source)
    transfer.read_tree(root, "/tests", tmp_path / "back")

    assert (tmp_path / "back/a/b/fixture.bin").read_bytes() == bytes(range(256))
    assert (root / "tests/test.sh").stat().st_mode & 0o777 == 0o755


def test_a_stamped_tree_has_one_time_and_no_bytecode(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg" / "__pycache__").mkdir(parents=True)
    (source / "pkg" / "__pycache__" / "m.cpython-312.pyc").touch()
    (source / "pkg" / "m.py").touch()
    (source / "old.pyc").touch()
    (source / "Dockerfile").touch()

    transfer.write_tree(root, "/workspace", source, mtime=1000.0, skipped=frozenset({"Dockerfile"}))

    copied = sorted((root / "workspace").rglob("*"))
    assert [path.relative_to(root / "workspace").as_posix() for path in copied] == ["pkg", "pkg/m.py"]
    assert {path.stat().st_mtime for path in [root / "workspace", *copied]} == {1000.0}


def test_a_link_in_place_of_a_directory_is_not_followed(root: Path, outside: Path, tmp_path: Path) -> None:
    (root / "tests").symlink_to(outside)
    source = tmp_path / "source"
    source.mkdir()
    (source / "shadow").write_text("overwritten")

    assert not transfer.is_directory(root, "/tests")
    with pytest.raises(TransferError, match="links and special files are not followed"):
        transfer.write_tree(root, "/tests/below", source)
    with pytest.raises(TransferError):
        transfer.read_tree(root, "/tests", tmp_path / "back")

    assert (outside / "shadow").read_text() == "secret"


def test_a_policy_cannot_keep_a_tree_out_by_what_it_puts_in_its_place(
    root: Path, outside: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True)
    (source / "shadow").write_text("tests")
    (source / "data" / "a").write_text("gold")
    (root / "tests").symlink_to(outside)
    transfer.write_tree(root, "/tests", source)
    assert not (root / "tests").is_symlink()
    assert (outside / "shadow").read_text() == "secret"
    (root / "tests" / "shadow").unlink()
    (root / "tests" / "shadow").mkdir()
    (root / "tests" / "shadow" / "more").symlink_to(outside)
    (root / "tests" / "data" / "a").unlink()
    (root / "tests" / "data").rmdir()
    (root / "tests" / "data").write_text("a file")
    transfer.write_tree(root, "/tests", source)
    assert (root / "tests" / "shadow").read_text() == "tests"
    assert (root / "tests" / "data" / "a").read_text() == "gold"
    assert (outside / "shadow").read_text() == "secret"


def test_a_link_in_place_of_a_file_is_replaced_never_written_through(
    root: Path, outside: Path, tmp_path: Path
) -> None:
    (root / "logs" / "x").symlink_to(outside / "shadow")
    (tmp_path / "new").write_text("new")

    transfer.write_file(root, "/logs/x", tmp_path / "new")

    assert (outside / "shadow").read_text() == "secret"
    assert (root / "logs" / "x").read_text() == "new"


def test_a_link_is_not_read_through(root: Path, outside: Path, tmp_path: Path) -> None:
    (root / "logs" / "link").symlink_to(outside / "shadow")
    (root / "logs" / "plain").write_text("plain")

    transfer.read_tree(root, "/logs", tmp_path / "back")
    with pytest.raises(TransferError):
        transfer.read_file(root, "/logs/link", tmp_path / "file")

    assert [path.name for path in (tmp_path / "back").iterdir()] == ["plain"]


def test_a_pipe_is_neither_waited_for_nor_copied(root: Path, tmp_path: Path) -> None:
    os.mkfifo(root / "logs" / "pipe")

    transfer.read_tree(root, "/logs", tmp_path / "back")
    with pytest.raises(TransferError, match="no plain file"):
        transfer.read_file(root, "/logs/pipe", tmp_path / "file")

    assert list((tmp_path / "back").iterdir()) == []


def test_what_is_too_large_is_named_instead_of_copied(root: Path, tmp_path: Path) -> None:
    with (root / "logs" / "huge").open("wb") as file:
        file.truncate(2**31)

    transfer.read_tree(root, "/logs", tmp_path / "back")

    assert [path.name for path in (tmp_path / "back").iterdir()] == ["huge.omitted"]
    assert (tmp_path / "back" / "huge.omitted").read_text().startswith("2147483648 bytes")


def test_a_link_at_the_destination_is_replaced(root: Path, outside: Path, tmp_path: Path) -> None:
    (root / "logs" / "shadow").write_text("from inside")
    back = tmp_path / "back"
    back.mkdir()
    (back / "shadow").symlink_to(outside / "shadow")

    transfer.read_tree(root, "/logs", back)

    assert (outside / "shadow").read_text() == "secret"
    assert (back / "shadow").read_text() == "from inside"


def test_a_path_may_not_climb(root: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"without '\.\.'"):
        transfer.read_file(root, "/logs/../../outside/shadow", tmp_path / "file")


def test_what_does_not_exist_is_said_to_be_missing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/logs/none does not exist in the sandbox"):
        transfer.read_tree(root, "/logs/none", tmp_path / "back")
    with pytest.raises(FileNotFoundError):
        transfer.read_file(root, "/logs/none", tmp_path / "file")


def test_a_tree_deeper_than_any_honest_one_is_cut(root: Path, tmp_path: Path) -> None:
    deep = root / "logs"
    for _ in range(transfer.MAX_DEPTH + 5):
        deep = deep / "d"
        deep.mkdir()

    transfer.read_tree(root, "/logs", tmp_path / "back")

    copied = max(len(path.relative_to(tmp_path / "back").parts) for path in (tmp_path / "back").rglob("*"))
    assert copied == transfer.MAX_DEPTH
