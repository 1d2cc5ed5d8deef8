"""Files that are there whole or not at all."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotage.files import append_line, write_atomically


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_write_replaces_the_content_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"a longer old content")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_a_reader_holds_open_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_atomically(path, b"new")
        assert reader.read() == b"old"


def test_what_a_killed_writer_left_is_replaced_with_its_permissions(tmp_path: Path) -> None:
    left = tmp_path / ".a.json.partial"
    left.write_bytes(b"half of a much longer content")
    left.chmod(0o644)
    write_atomically(tmp_path / "a.json", b"whole", mode=0o600)
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    assert mode_of(tmp_path / "a.json") == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / ".a.json.partial").symlink_to(elsewhere)
    write_atomically(tmp_path / "a.json", b"secret", mode=0o600)
    assert not elsewhere.exists()
    assert not (tmp_path / "a.json").is_symlink()


def test_a_private_file_stays_private_and_any_other_obeys_the_umask(tmp_path: Path, umask: int) -> None:
    write_atomically(tmp_path / "private", b"", mode=0o600)
    write_atomically(tmp_path / "plain", b"")
    assert mode_of(tmp_path / "private") == 0o600
    assert mode_of(tmp_path / "plain") == 0o666 & ~umask


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()  # a file cannot replace a directory
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "a.json", b"new")
    assert os.listdir(tmp_path) == ["a.json"]


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, b"1")
    append_line(path, b"2")
    assert path.read_bytes() == b"1\n2\n"


def test_a_line_after_a_torn_one_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, b"1")
    with path.open("ab") as file:
        file.write(b'{"at": 17')
    append_line(path, b"2")
    append_line(path, b"3")
    assert path.read_bytes() == b'1\n{"at": 17\n2\n3\n'
