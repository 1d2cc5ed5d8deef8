"""The report's numbers against a count of one's own, from the rollouts as they lie on disk."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.loops.rig import Rig

from pilotage.loops import LoopSettings, RunDirectory, read_rollout
from pilotage.loops.requests import group_requests
from pilotage.ops.report import format_comparison, format_report
from pilotage.types import Outcome, Rollout, Task

SETTINGS = LoopSettings(num_steps=20, tasks_per_step=3, group_size=4, checkpoint_every_steps=100)
ENDS = [outcome for outcome in Outcome if outcome != Outcome.COMPLETED]


def ends_of_a_bad_run(share: float = 0.3) -> dict[str, Outcome]:
    """Every outcome in turn, for 30 % of the rollouts."""
    task = Task(id="t", path=Path("/t"))
    ids = [
        request.id
        for number in range(SETTINGS.num_steps * SETTINGS.tasks_per_step)
        for request in group_requests(task, number, settings=SETTINGS)
    ]
    chosen = np.random.default_rng(0).permutation(ids)[: round(share * len(ids))]
    return {str(name): ENDS[index % len(ENDS)] for index, name in enumerate(chosen)}


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return float(found[1])


async def test_a_report_of_a_run_with_failures_agrees_with_its_rollouts(tmp_path: Path) -> None:
    rig = Rig(settings=SETTINGS, ends=ends_of_a_bad_run())
    await rig.run(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    text = format_report(run.metrics(), window=10)

    rollouts: dict[int, list[Rollout]] = {}
    for path in run.rollout_files():
        if path.parent.name.startswith("step-"):
            rollouts.setdefault(int(path.parent.name[-4:]), []).append(read_rollout(path))
    everything = [rollout for step in rollouts.values() for rollout in step]

    counted = Counter(str(rollout.outcome) for rollout in everything)
    listed = dict(re.findall(r"(\w+) (\d+)", next(x for x in text.splitlines() if x.startswith("outcomes:"))))
    assert {name: int(count) for name, count in listed.items()} == dict(counted)
    assert set(counted) == {str(outcome) for outcome in Outcome}

    missing = sum(rollout.reward is None for rollout in everything)
    assert f"rollouts without a reward: {missing} of {len(everything)}" in text
    assert missing == len(list((tmp_path / "run" / "errors").glob("step-*.error")))

    sampled = sum(turn.completion_ids.size for r in everything for turn in r.trajectory.turns)
    balance = [
        number(text, pattern)
        for pattern in (r"sampled (\d+) =", r"trained (\d+) \+", r"masked (\d+) \+", r"dropped (\d+) \(")
    ]
    assert balance[0] == sampled == sum(balance[1:])

    for first in (1, 11):
        means = [
            np.mean([r.reward.value for r in rollouts[step] if r.reward is not None])
            for step in range(first, first + 10)
        ]
        row = rf"{first}-{first + 9} +([0-9.]+) +\d+"
        assert number(text, row) == pytest.approx(float(np.mean(means)), abs=5e-4)


async def test_runs_side_by_side_have_the_means_of_each(tmp_path: Path) -> None:
    long, short = Rig(settings=SETTINGS), Rig(settings=SETTINGS.model_copy(update={"num_steps": 10}))
    await long.run(tmp_path / "long")
    await short.run(tmp_path / "short")
    runs = {name: RunDirectory(tmp_path / name).metrics() for name in ("long", "short")}
    rows = [line.split() for line in format_comparison(runs, window=10).splitlines()]
    assert rows[0] == ["steps", "long", "short"]
    assert [row[0] for row in rows[1:3]] == ["1-10", "11-20"]
    assert rows[2][2] == "-"
    for column, name in ((1, "long"), (2, "short")):
        mean = np.mean([record["reward/mean"] for record in runs[name][1:11]])
        assert float(rows[1][column]) == pytest.approx(float(mean), abs=5e-4)
