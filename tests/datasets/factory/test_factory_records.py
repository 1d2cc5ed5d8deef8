"""Patches as `git apply` reads them, the table of yields, and results in order."""

import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest

from pilotage.datasets.factory.package_bugs import Yield, in_order
from pilotage.datasets.factory.records import unified_patch
from pilotage.datasets.factory.yields import yield_table


@pytest.mark.parametrize(
    ("clean", "buggy"),
    [
        (b"a\nb\nc\n", b"a\nB\nc\n"),
        (b"a\nb", b"a\nB"),  # no newline at the end of the file
        (b"a\nb", b"a\nb\n"),
        (b"a\r\nb\r\n", b"a\r\nB\r\n"),
        (b"a = '\x0c'\nb\n", b"a = '\x0c'\nB\n"),  # what splitlines takes for the end of a line
        ("caf\u00e9\u2028x\n".encode(), "caf\u00e9\u2028y\n".encode()),
    ],
)
def test_a_patch_applies_and_in_reverse(tmp_path: Path, clean: bytes, buggy: bytes) -> None:
    path = tmp_path / "m.py"
    path.write_bytes(clean)
    patch = unified_patch({"m.py": clean}, {"m.py": buggy}).encode()
    for options, expected in (((), buggy), (("-R",), clean)):
        subprocess.run(["git", "apply", *options, "-"], cwd=tmp_path, input=patch, check=True)
        assert path.read_bytes() == expected


def test_the_table_has_a_row_each_their_sum_and_room_for_scores() -> None:
    rows = {
        "a": Yield(tried=10, ran=8, valid=6, kept=5, run_s=60.0),
        "b": Yield(tried=1, ran=0, valid=0, kept=0, run_s=0.0),
    }
    # 6 valid in 60 s are 6.0 a minute; b ran nothing, so it has no rate.
    assert yield_table("package", rows, {"BM25": {"a": "1.34"}}) == (
        "| package | tried | ran | valid | kept | valid / minute | BM25 |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| a | 10 | 8 | 6 | 5 | 6.0 | 1.34 |\n"
        "| b | 1 | 0 | 0 | 0 | - | - |\n"
        "| all | 11 | 8 | 6 | 5 | 6.0 | - |\n"
    )


@pytest.mark.parametrize("lookahead", [1, 2, 5, 20])
def test_results_come_in_order_and_no_more_than_asked_for_are_under_way(lookahead: int) -> None:
    under_way: list[int] = []
    most = 0

    def start(item: int) -> Future[int]:
        nonlocal most
        under_way.append(item)
        most = max(most, len(under_way))
        future: Future[int] = Future()
        future.set_result(item * item)
        return future

    seen: list[tuple[int, int]] = []
    for item, square in in_order(range(10), start, lookahead):
        under_way.remove(item)
        seen.append((item, square))
    assert seen == [(item, item * item) for item in range(10)]
    assert most == min(lookahead, 10)
