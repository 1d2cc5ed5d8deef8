"""What a group works on is a function of the seed and its number alone."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pilotage.loops import LoopSettings
from pilotage.loops.requests import evaluation_requests, group_requests, rollout_seed, task_of_group
from pilotage.types import LossConfig, Outcome, SamplingParams, Task


def make_tasks(count: int) -> list[Task]:
    return [Task(id=f"t/{index}", path=Path(f"/t/{index}")) for index in range(count)]


@settings(deadline=None)
@given(count=st.integers(1, 7), epochs=st.integers(1, 5), seed=st.integers(0, 2**40))
def test_each_epoch_holds_every_task_once(count: int, epochs: int, seed: int) -> None:
    tasks = make_tasks(count)
    row = [task_of_group(tasks, number, seed=seed).id for number in range(count * epochs)]
    for start in range(0, len(row), count):
        assert sorted(row[start : start + count]) == sorted(task.id for task in tasks)


def test_epochs_are_shuffled_and_seeds_differ() -> None:
    tasks = make_tasks(20)
    rows = {
        tuple(task_of_group(tasks, 20 * epoch + index, seed=seed).id for index in range(20))
        for epoch in range(3)
        for seed in (0, 1)
    }
    assert len(rows) == 6


def test_groups_are_of_one_task_and_named_after_where_they_stand_with_seeds_of_their_own() -> None:
    settings = LoopSettings(
        seed=3,
        tasks_per_step=2,
        group_size=3,
        sampling=SamplingParams(temperature=0.7),
        loss=LossConfig(temperature=0.7),
    )
    requests = [
        request
        for number, task in zip((2, 3), make_tasks(2), strict=True)
        for request in group_requests(task, number, settings=settings)
    ]
    assert [request.id for request in requests] == [
        f"step-0002-{group:02d}-{index:02d}" for group in range(2) for index in range(3)
    ]
    for group in (requests[:3], requests[3:]):
        assert len({request.group_id for request in group}) == 1
        assert len({request.task.id for request in group}) == 1
    assert len({request.group_id for request in requests}) == 2
    assert len({request.sampling.seed for request in requests}) == 6
    assert {request.sampling.temperature for request in requests} == {0.7}


def test_an_evaluation_asks_for_every_task_once_at_its_own_temperature() -> None:
    tasks = make_tasks(3)
    requests = evaluation_requests(tasks, settings=LoopSettings(), step=10)
    assert [(request.id, request.task.id) for request in requests] == [
        ("eval-0010-00", "t/0"),
        ("eval-0010-01", "t/1"),
        ("eval-0010-02", "t/2"),
    ]
    assert {request.sampling.temperature for request in requests} == {0.0}


def test_rollout_seeds_are_distinct_and_fit_63_bits() -> None:
    seeds = {
        rollout_seed(seed, f"step-{step:04d}-{group:02d}-{index:02d}")
        for seed in range(2)
        for step in range(1, 30)
        for group in range(8)
        for index in range(4)
    }
    assert len(seeds) == 2 * 29 * 8 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("outcome", ["turns_exhausted", "context_exceeded", "tokens_exhausted"])
@pytest.mark.parametrize("choice", ["train", "mask"])
def test_a_recipe_chooses_for_rollouts_that_were_cut_short(outcome: str, choice: str) -> None:
    rules = LoopSettings.model_validate({outcome: choice}).outcome_rules()
    rule = rules[Outcome(outcome)]
    assert (rule.is_trained, rule.in_baseline, rule.has_reward) == (choice == "train",) * 2 + (True,)
    assert rules.keys() == set(Outcome)
    assert rules[Outcome.AGENT_ERROR].max_retries == 1


def test_an_importance_ratio_between_two_temperatures_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"sampling\.temperature 0\.7 differs from loss\.temperature 1\.0"
    ):
        LoopSettings(sampling=SamplingParams(temperature=0.7))


@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.9), SamplingParams(top_k=20)])
def test_sampling_that_renormalises_log_probs_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(ValidationError, match=r"training needs sampling\.top_p = 1 and sampling\.top_k = 0"):
        LoopSettings(sampling=sampling)
