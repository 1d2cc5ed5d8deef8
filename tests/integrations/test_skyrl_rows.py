"""SkyRL's batch holds what was recorded, once, and compares only what may be compared."""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from tests.algorithms.strategies import make_rollout, make_turn, steps
from tests.integrations.rig import VLLM_PARAMS, Engines, Finished, Identity, Settings, batch_of
from tests.rollouts.rig import write_task

from pilotage.algorithms import to_samples
from pilotage.errors import ConfigError, RewardError, TaskError
from pilotage.integrations.skyrl import GeneratorInput, GeneratorOutput, SkyRLGenerator, write_dataset
from pilotage.integrations.skyrl.rows import Batch
from pilotage.types import OUTCOME_RULES, Outcome, OutcomeRule, Rollout, SamplingParams

MASKED = OutcomeRule(has_reward=True, is_trained=False, in_baseline=False)


def built(
    rollouts: Sequence[Rollout],
    *,
    is_training: bool = True,
    rules: Mapping[Outcome, OutcomeRule] = OUTCOME_RULES,
) -> GeneratorOutput:
    """Return the batch of these rollouts, grouped by their `group_id`."""
    batch = Batch(rules=rules, is_training=is_training)
    for group in dict.fromkeys(rollout.group_id for rollout in rollouts):
        members = [rollout for rollout in rollouts if rollout.group_id == group]
        batch.add_group([Identity(group, index) for index in range(len(members))], members)
    return batch.finished(rollouts)


def test_a_conversation_is_one_row_cut_before_its_first_sampled_token() -> None:
    turns = (make_turn(None, [1, 2], [4, 5]), make_turn(0, [9], [7]))
    output = built([make_rollout("a", *turns, reward=1.0), make_rollout("b", reward=0.0)])

    #                                          A0 A0 T  A1
    assert output["prompt_token_ids"][0] == [1, 2]
    assert output["response_ids"][0] == [4, 5, 9, 7]
    assert output["loss_masks"][0] == [1, 1, 0, 1]
    expected = np.array([-0.04, -0.05, 0, -0.07], np.float32)
    assert output["rollout_logprobs"][0] == expected.tolist()
    assert output["rewards"] == [1.0, 0.0]
    assert output["is_last_step"] == [True, True]
    assert output["stop_reasons"] == ["completed", "completed"]
    assert output["trajectory_ids"] == [Identity("group", 0), Identity("group", 1)]


def test_each_branch_is_a_row_of_the_same_trajectory_and_shared_tokens_are_trained_in_the_first() -> None:
    branched = (make_turn(None, [1], [2, 3]), make_turn(0, [4], [5]), make_turn(0, [6], [7]))
    output = built([make_rollout("a", *branched, reward=2.0), make_rollout("b", reward=0.0)])

    assert output["prompt_token_ids"][:2] == [[1], [1, 2, 3, 6]]
    assert output["response_ids"][:2] == [[2, 3, 4, 5], [7]]
    assert output["loss_masks"][:2] == [[1, 1, 0, 1], [1]]
    assert output["rewards"] == [2.0, 2.0, 0.0]
    assert output["is_last_step"] == [False, True, True]
    assert [identity.repetition_id for identity in output["trajectory_ids"]] == [0, 0, 1]


def test_a_rollout_without_a_reward_has_no_row_and_spoils_no_sibling() -> None:
    failed = make_rollout("b", reward=None, outcome=Outcome.AGENT_ERROR)
    output = built([make_rollout("a", reward=1.0), failed, make_rollout("c", reward=0.0)])

    assert [identity.repetition_id for identity in output["trajectory_ids"]] == [0, 2]
    assert all(all(mask) for mask in output["loss_masks"])
    metrics = output["rollout_metrics"]
    assert metrics["reward/none_count"] == 1
    assert metrics["outcome/agent_error"] == 1
    assert metrics["ledger/dropped_tokens/agent_error"] == 3
    assert (metrics["ledger/sampled_tokens"], metrics["ledger/trained_tokens"]) == (9, 6)


def test_a_rollout_that_the_recipe_masks_is_out_of_the_baseline() -> None:
    rules = {**OUTCOME_RULES, Outcome.TURNS_EXHAUSTED: MASKED}
    cut = make_rollout("b", reward=5.0, outcome=Outcome.TURNS_EXHAUSTED)
    output = built([make_rollout("a", reward=1.0), cut, make_rollout("c", reward=0.0)], rules=rules)

    assert output["rewards"] == [1.0, 0.0]
    assert output["rollout_metrics"]["ledger/masked_tokens/turns_exhausted"] == 3


def test_a_rollout_without_a_sibling_is_not_trained_on_its_bare_reward() -> None:
    failed = make_rollout("b", reward=None, outcome=Outcome.AGENT_TIMEOUT)
    output = built([make_rollout("a", reward=3.0), failed])

    assert output["response_ids"] == [[3, 4, 5]]
    assert output["loss_masks"] == [[0, 0, 0]]
    assert output["rollout_metrics"]["groups_too_small"] == 1
    assert output["rollout_metrics"]["ledger/dropped_tokens/group_too_small"] == 3


def test_a_prompt_of_which_all_rollouts_failed_keeps_a_place_that_trains_nothing() -> None:
    lost = [make_rollout(name, reward=None, outcome=Outcome.SAMPLER_ERROR, group_id="lost") for name in "ab"]
    output = built([*lost, make_rollout("c", reward=1.0), make_rollout("d", reward=0.0)])

    assert [identity.instance_id for identity in output["trajectory_ids"]] == ["lost", "group", "group"]
    assert output["loss_masks"][0] == [0]
    assert output["is_last_step"] == [True, True, True]
    assert output["rollout_metrics"]["reward/none_count"] == 2


def test_a_reward_counts_even_where_nothing_was_sampled() -> None:
    silent = make_rollout("a", make_turn(None, [1], [2], is_delivered=False), reward=1.0)
    output = built([silent, make_rollout("b", reward=0.0)])

    assert output["rewards"] == [1.0, 0.0]
    assert output["loss_masks"] == [[0], [1, 1, 1]]
    assert output["rollout_metrics"]["ledger/masked_tokens/orphan"] == 1


def test_an_evaluation_shows_every_reward_and_no_other() -> None:
    rules = {**OUTCOME_RULES, Outcome.TURNS_EXHAUSTED: MASKED}
    rollouts = [
        make_rollout("a", reward=1.0, group_id="0", outcome=Outcome.TURNS_EXHAUSTED),
        make_rollout("b", reward=None, group_id="1", outcome=Outcome.VERIFIER_ERROR),
    ]
    output = built(rollouts, is_training=False, rules=rules)

    assert output["rewards"] == [1.0]
    assert output["loss_masks"] == [[1, 1, 1]]
    with pytest.raises(
        RewardError, match=r"no rollout of the evaluation has a reward \(1 x verifier_error\)"
    ):
        built(rollouts[1:], is_training=False, rules=rules)


@given(steps)
def test_every_row_replays_what_the_sampler_saw_and_the_ledger_is_that_of_the_rows(
    rollouts: list[Rollout],
) -> None:
    if not rollouts:
        return
    output = built(rollouts)

    rows = list(zip(output["prompt_token_ids"], output["response_ids"], output["loss_masks"], strict=True))
    metrics = output["rollout_metrics"]
    assert metrics["ledger/trained_tokens"] == sum(sum(mask) for _, _, mask in rows)
    assert metrics["ledger/sampled_tokens"] == sum(rollout.trajectory.sampled_tokens for rollout in rollouts)
    seen = [
        sample.token_ids.tolist()
        for rollout in rollouts
        for sample in to_samples(rollout.trajectory, sequence_id="s", group_id="g", advantage=0.0)
    ]
    assert all(prompt + response in [*seen, [0, 0]] for prompt, response, _ in rows)
    # SkyRL's own law of rows: a trajectory's are adjacent, and the last one says so.
    ids, is_last = output["trajectory_ids"], output["is_last_step"]
    changes = [left != right for left, right in itertools.pairwise(ids)]
    assert is_last == [*changes, True]
    assert len(set(ids)) == sum(is_last)


# --- what SkyRL may ask ---


async def test_a_batch_becomes_one_request_for_each_trajectory_in_order(tmp_path: Path) -> None:
    first, second = write_task(tmp_path, "first"), write_task(tmp_path, "second")
    rollouts = {uid: [make_rollout(uid, reward=float(n)) for n in range(3)] for uid in ("4", "9")}
    runner = Finished(rollouts=rollouts)
    generator = SkyRLGenerator(runner, config=Settings())

    output = await generator.generate(batch_of({"4": first.path, "9": second.path}))
    await generator.generate(batch_of({"4": first.path}, samples=1, phase="eval"))

    assert output["rewards"] == [0.0, 1.0, 0.0, 1.0]
    assert [request.group_id for request in runner.requests] == ["4", "4", "9", "9", "4"]
    assert [request.task.path.name for request in runner.requests[:4]] == ["first"] * 2 + ["second"] * 2
    assert [request.id for request in runner.requests] == [
        "train-0003-4-0-0",
        "train-0003-4-1-1",
        "train-0003-9-0-2",
        "train-0003-9-1-3",
        "eval-0003-4-0-4",
    ]
    assert runner.requests[0].sampling == SamplingParams(temperature=1.0, max_tokens=256)


def refused(batch: GeneratorInput) -> str:
    generator = SkyRLGenerator(Finished(rollouts={}), config=Settings())
    with pytest.raises(ConfigError) as caught:
        asyncio.run(generator.generate(batch))
    return str(caught.value)


def test_what_rollouts_cannot_have_is_refused_in_one_line(tmp_path: Path) -> None:
    batch = batch_of({"0": write_task(tmp_path).path})

    asked: list[tuple[dict[str, object], str]] = [
        ({"stop": ["</answer>"]}, "rollouts cannot have stop = ['</answer>']"),
        ({"min_p": 0.1}, "rollouts cannot have min_p = 0.1"),
        ({"seed": 3}, "rollouts cannot have seed = 3"),
        ({"temperature": -1.0}, "temperature must lie in [0, 10], got -1.0"),
        ({"top_k": "5"}, "generator.sampling_params.top_k = '5': not a number"),
    ]
    for change, message in asked:
        assert message in refused({**batch, "sampling_params": {**VLLM_PARAMS, **change}})
    assert "has no sampling_params" in refused({**batch, "sampling_params": None})
    assert "has no trajectory_ids" in refused({**batch, "trajectory_ids": None})
    assert "0 env_extras for 2 trajectories" in refused({**batch, "env_extras": None})
    assert "task_path = None" in refused({**batch, "env_extras": [{}, {}]})
    assert "set 2 or more" in refused(batch_of({"0": tmp_path / "toy"}, samples=1))
    assert "no such directory" in refused(batch_of({"0": tmp_path / "nothing"}))
    write_task(tmp_path, "other")
    assert "2 Harbor tasks; a row of the dataset is one task" in refused(batch_of({"0": tmp_path}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(step_wise_trajectories=False), "set generator.step_wise_trajectories=true"),
        (Settings(apply_overlong_filtering=True), "apply_overlong_filtering has no effect"),
        (Settings(zero_reward_on_non_stop=True), "zero_reward_on_non_stop has no effect"),
        (Settings(inference_engine=Engines(engine_init_kwargs={})), "logprobs_mode=processed_logprobs"),
    ],
)
def test_settings_that_rollouts_do_not_follow_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkyRLGenerator(Finished(rollouts={}), config=settings)


def test_rules_that_rows_cannot_express_are_refused() -> None:
    rule = replace(OUTCOME_RULES[Outcome.STUCK], in_baseline=False)
    with pytest.raises(
        ConfigError, match="outcome stuck: trained and counted in the baseline must be the same"
    ):
        SkyRLGenerator(Finished(rollouts={}), config=Settings(), rules={Outcome.STUCK: rule})


def test_a_dataset_has_one_line_for_each_task(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "tasks", name)
    file = tmp_path / "train.jsonl"

    assert write_dataset([tmp_path / "tasks"], file) == 2

    first, second = map(json.loads, file.read_text().splitlines())
    assert first == {
        "prompt": [{"role": "user", "content": "Find the place of the bug.\n"}],
        "data_source": "tasks",
        "task_path": str(tmp_path / "tasks" / "a"),
    }
    assert second["task_path"].endswith("/b")
    with pytest.raises(TaskError, match="no such directory"):
        write_dataset([tmp_path / "nothing"], file)
