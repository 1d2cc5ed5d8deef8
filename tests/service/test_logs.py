"""A log is read in pages by byte offset: no line twice, none missed, none half."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pilotage.service.logs import read_page, tail


def texts(page: dict[str, object]) -> list[str]:
    entries = page["entries"]
    assert isinstance(entries, list)
    return [entry.get("msg", entry.get("_raw")) for entry in entries]


def test_pages_hold_whole_lines_and_the_end_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_page(path, cursor=0, max_lines=5, has_ended=False) == {
        "entries": [], "next_cursor": "0", "eof": True,
    }  # fmt: skip
    path.write_text("WARNING pilotage: one\ntwo\nthr")
    first = read_page(path, cursor=0, max_lines=1, has_ended=False)
    assert first["entries"] == [{"level": "WARNING", "logger": "pilotage", "msg": "one"}]
    assert first["eof"] is False
    second = read_page(path, cursor=int(first["next_cursor"]), max_lines=5, has_ended=False)
    assert (texts(second), second["eof"]) == (["two"], True)
    with path.open("a") as file:
        file.write("ee\n")
    third = read_page(path, cursor=int(second["next_cursor"]), max_lines=5, has_ended=False)
    assert (texts(third), third["eof"]) == (["three"], True)


def test_the_last_line_of_an_ended_job_is_read_though_it_is_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\nCUDA error")
    page = read_page(path, cursor=0, max_lines=9, has_ended=True)
    assert (texts(page), page["eof"]) == (["one", "CUDA error"], True)
    assert tail(path, 1) == ("CUDA error",)


@given(lines=st.lists(st.text("abc {}", max_size=20), max_size=30), max_lines=st.integers(1, 7))
def test_any_page_size_gives_every_line_once(lines: list[str], max_lines: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        path.write_text("".join(line + "\n" for line in lines))
        read: list[str] = []
        cursor, eof = 0, False
        while not eof:
            page = read_page(path, cursor=cursor, max_lines=max_lines, has_ended=True)
            read += texts(page)
            cursor, eof = int(page["next_cursor"]), page["eof"]
        assert read == lines
