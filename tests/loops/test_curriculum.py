"""Tasks drawn by their pass rates."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.algorithms.strategies import make_rollout
from tests.loops.rig import make_tasks

from pilotage.errors import RunDirectoryError
from pilotage.loops import LoopSettings, RunDirectory
from pilotage.loops.curriculum import Curriculum, CurriculumSettings
from pilotage.types import Rollout

TASKS = make_tasks("train", 6)


def curriculum(path: Path, *, max_reward: float = 1.0, num_tasks: int = 6) -> Curriculum:
    path.mkdir(exist_ok=True)
    settings = CurriculumSettings(max_reward=max_reward)
    return Curriculum(TASKS[:num_tasks], settings, seed=0, run=RunDirectory(path))


def ended(rewards: Sequence[float | None]) -> list[Rollout]:
    return [make_rollout(f"r{index}", reward=reward) for index, reward in enumerate(rewards)]


def draws(
    found: Curriculum, rewards: Sequence[Sequence[float | None]], numbers: Sequence[int]
) -> Counter[str]:
    """Run one group after the other; a task's rollouts always get the same rewards."""
    of_task = {task.id: reward for task, reward in zip(TASKS, rewards, strict=False)}
    counts: Counter[str] = Counter()
    for number in numbers:
        task = found.task_of(number)
        counts[task.id] += 1
        found.finish(number, ended(of_task[task.id]))
    return counts


def test_tasks_that_are_solved_sometimes_are_drawn_most_and_every_task_now_and_then(tmp_path: Path) -> None:
    rewards = [[1, 0], [1, 1], [0, 0], [1, 1], [0, 0], [0, 0, 0, 1]]
    counts = draws(curriculum(tmp_path), rewards, range(1200))
    # Weights 1, .1, .1, .1, .1 and .75 of 2.15.
    shares = [counts[task.id] / 1200 for task in TASKS]
    assert shares == pytest.approx([0.465, 0.047, 0.047, 0.047, 0.047, 0.349], abs=0.05)


def test_tasks_that_were_not_tried_come_before_tasks_that_are_solved(tmp_path: Path) -> None:
    counts = draws(curriculum(tmp_path), [[1, 1]] * 6, range(30))
    assert set(counts) == {task.id for task in TASKS}


def test_a_pass_rate_is_of_the_newest_groups_as_a_share_of_the_largest_reward(tmp_path: Path) -> None:
    found = curriculum(tmp_path, max_reward=3, num_tasks=1)
    task_id = TASKS[0].id
    assert found.pass_rate(task_id) is None
    for number, rewards in enumerate([[0, 0], [3, 0], [3, 3]]):
        found.task_of(number)
        found.finish(number, ended(rewards))
    assert found.pass_rate(task_id) == 0.75
    found.task_of(3)
    found.finish(3, ended([None, None]))  # faults say nothing of the task
    assert found.pass_rate(task_id) == 0.75


def test_groups_under_way_work_on_different_tasks_as_long_as_there_are_some(tmp_path: Path) -> None:
    found = curriculum(tmp_path)
    first = [found.task_of(number).id for number in range(6)]
    assert sorted(first) == [task.id for task in TASKS]
    found.task_of(6)  # more groups than tasks


@pytest.mark.parametrize("killed_after", [0, 3, 10, 39])
def test_taken_up_again_it_chooses_as_if_it_had_not_been_interrupted(
    tmp_path: Path, killed_after: int
) -> None:
    rewards = [[1, 0], [1, 1], [0, 0], [1, 0, 0], [0, 0], [1, 1, 0]]
    whole = draws(curriculum(tmp_path / "whole"), rewards, range(40))
    path = tmp_path / "killed"
    killed = draws(curriculum(path), rewards, range(killed_after))
    with (path / "groups.jsonl").open("ab") as file:
        file.write(b'{"group": 3, "ta')  # torn
    start = killed_after // 2  # its checkpoint
    again = draws(curriculum(path), rewards, range(start, 40))
    undone = draws(curriculum(path), rewards, range(start, killed_after))
    assert killed + again - undone == whole


def test_a_run_whose_groups_work_on_tasks_that_are_gone_is_refused(tmp_path: Path) -> None:
    draws(curriculum(tmp_path), [[1, 0]] * 6, range(20))
    with pytest.raises(RunDirectoryError, match=r"groups\.jsonl: group \d+ works on train/\d, which tasks"):
        curriculum(tmp_path, num_tasks=2)


def test_a_recipe_switches_it_on_by_naming_the_largest_reward() -> None:
    assert LoopSettings.model_validate({"curriculum": {"max_reward": 3}}).curriculum == CurriculumSettings(
        max_reward=3
    )
    assert LoopSettings().curriculum is None
