"""Summaries beside the rollouts: they say what the rollouts say, whatever was killed in between."""

from dataclasses import replace
from pathlib import Path

from tests.algorithms.strategies import make_rollout, make_turn

from pilotage.loops import RunDirectory, read_rollout
from pilotage.loops.summaries import SUMMARY_FILE, complete_summaries, read_summaries, summarise
from pilotage.types import BranchCause, Rollout


def rollout_of(name: str, *, tool: str = "terminal") -> Rollout:
    first = replace(make_turn(None, [1, 2, 3], [4, 5]), called_tools=(tool, "finish"), started_at=10.0)
    again = replace(
        make_turn(0, [6], [7, 8, 9]), called_tools=(tool,), branch_cause=BranchCause.RETRY, finished_at=30.0
    )
    return replace(
        make_rollout(name, first, again, reward=0.5), counters={"requests": 2}, timings_s={"total": 21.0}
    )


def written(path: Path, *rollouts: Rollout) -> Path:
    (path / "errors").mkdir(parents=True, exist_ok=True)
    for rollout in rollouts:
        RunDirectory(path).add_rollout("step-0001", rollout)
    return path / "rollouts" / "step-0001"


def test_a_line_says_what_its_rollout_says(tmp_path: Path) -> None:
    directory = written(tmp_path, rollout_of("a"))
    (line,), _ = read_summaries(directory)
    summary = line.summary
    assert line.file_bytes == (directory / "a.json.gz").stat().st_size
    assert summary == summarise("step-0001", read_rollout(directory / "a.json.gz"))
    assert (summary.id, summary.folder, summary.reward, summary.total_s) == ("a", "step-0001", 0.5, 21.0)
    # Context 3 + 1, sampled 2 + 3.
    assert (summary.turns, summary.branches, summary.tokens, summary.sampled_tokens) == (2, 1, 9, 5)
    assert (summary.tools, summary.counters) == (("finish", "terminal"), {"requests": 2})
    assert (summary.started_at, summary.finished_at) == (0.0, 30.0)
    assert summary.skeleton().reward is not None


def test_a_reader_goes_on_where_it_stopped_and_leaves_a_torn_line(tmp_path: Path) -> None:
    directory = written(tmp_path, rollout_of("a"))
    first, end = read_summaries(directory)
    with (directory / SUMMARY_FILE).open("ab") as file:
        file.write(b'{"file_bytes": 12, "summ')
    assert read_summaries(directory, start=end) == ([], end)
    with (directory / SUMMARY_FILE).open("ab") as file:
        file.write(b'\n{"another": "version"}\n')
    written(tmp_path, rollout_of("b"))
    later, _ = read_summaries(directory, start=end)
    assert [line.summary.id for line in first + later] == ["a", "b"]


def test_without_the_file_there_are_no_lines_and_nothing_was_read(tmp_path: Path) -> None:
    assert read_summaries(tmp_path) == ([], 0)


def test_lines_that_a_killed_writer_did_not_come_to_write_are_made_up_for(tmp_path: Path) -> None:
    directory = written(tmp_path, rollout_of("a"), rollout_of("b"), rollout_of("c"))
    lines = (directory / SUMMARY_FILE).read_bytes().splitlines(keepends=True)
    (directory / SUMMARY_FILE).write_bytes(lines[0] + lines[2][:20])
    (directory / "b.json.gz").write_bytes(b"damaged")
    complete_summaries(directory)
    complete_summaries(directory)
    found, _ = read_summaries(directory)
    assert [line.summary.id for line in found] == ["a", "c"]
    assert found[1].summary == summarise("step-0001", rollout_of("c"))
