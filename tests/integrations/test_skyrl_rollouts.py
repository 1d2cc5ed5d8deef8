"""Whole rollouts for SkyRL: real Harbor trials and OpenHands SDK, a real proxy, and SkyRL's interface."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.fakes import END, ScriptedSampler, WordRenderer
from tests.integrations.rig import VLLM_PARAMS, EngineClient, Settings, Watched, batch_of
from tests.rollouts.rig import HAND_IN, Turn, script_of, write_task

from pilotage.engine import LocalEngine
from pilotage.integrations.skyrl import GeneratorOutput, SkyRLGenerator, SkyRLSampler
from pilotage.interfaces import Renderer
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.recipes import load_recipe
from pilotage.recipes.stack import runner_settings
from pilotage.rendering import load_renderer
from pilotage.rollouts import AgentChoice, HarborRunner, RunnerSettings
from pilotage.types import BranchCause, Rollout, Trajectory

pytestmark = pytest.mark.agents

ROOT = Path(__file__).resolve().parents[2]
LOOK: Turn = ("code_search", {"query": "gamma"})
SPLIT: Turn = [("code_search", '{"query": "gam'), LOOK]
"""Two calls, the first of them cut: OpenHands sends the message back as two, which is another branch."""


@contextlib.asynccontextmanager
async def generator_on(
    client: EngineClient, renderer: Renderer, settings: RunnerSettings, *, max_context_tokens: int
) -> AsyncGenerator[tuple[SkyRLGenerator, Watched]]:
    """Open what SkyRL's trainer is given, and keep the rollouts that it ran."""
    sampler = SkyRLSampler(
        client, max_context_tokens=max_context_tokens, stop_token_ids=renderer.stop_token_ids
    )
    proxy = ChatCompletionsProxy(sampler, renderer)
    async with serve(proxy), HarborRunner(sessions=proxy, settings=settings) as runner:
        watched = Watched(runner=runner)
        yield SkyRLGenerator(watched, config=Settings()), watched


def scripted_settings(directory: Path) -> RunnerSettings:
    tools = ("terminal", "code_search", "localization_finish")
    return RunnerSettings(
        trials_directory=directory / "trials", workers=0, agent=AgentChoice(options={"tools": tools})
    )


def sampled(trajectory: Trajectory) -> list[tuple[int, float]]:
    """Return the sampled ids with their log-probs, turn by turn."""
    return [
        pair
        for turn in trajectory.turns
        for pair in zip(turn.completion_ids.tolist(), turn.logprobs.tolist(), strict=True)
    ]


def check(output: GeneratorOutput, rollouts: Mapping[str, Rollout]) -> None:
    """Every row is a branch of the trajectory that it names, id for id, with its rollout's reward."""
    of_trajectory = {
        (request.group_id, int(name.split("-")[3])): request for name, request in rollouts.items()
    }
    trained: dict[tuple[str, int], list[tuple[int, float]]] = {key: [] for key in of_trajectory}
    for index, identity in enumerate(output["trajectory_ids"]):
        key = (identity.instance_id, identity.repetition_id)
        rollout, ids = of_trajectory[key], output["response_ids"][index]
        assert rollout.reward is not None
        assert output["rewards"][index] == rollout.reward.value
        assert output["stop_reasons"][index] == rollout.outcome
        assert output["trajectory_generation_times"][index] == rollout.timings_s["total"] > 0
        branches = [
            np.concatenate(
                [rollout.trajectory.prompt_ids(leaf), rollout.trajectory.turns[leaf].completion_ids]
            )
            for leaf in rollout.trajectory.leaves()
        ]
        assert output["prompt_token_ids"][index] + ids in [branch.tolist() for branch in branches]
        logprobs, mask = output["rollout_logprobs"][index], output["loss_masks"][index]
        trained[key] += [
            pair for pair, read in zip(zip(ids, logprobs, strict=True), mask, strict=True) if read
        ]
        assert all(value == 0 for value, read in zip(logprobs, mask, strict=True) if not read)
    for key, rollout in of_trajectory.items():
        assert sorted(trained[key]) == sorted(sampled(rollout.trajectory))


async def test_the_rows_of_real_trials_are_what_the_proxy_recorded(tmp_path: Path) -> None:
    words = WordRenderer()
    scripted = ScriptedSampler(script=script_of(words, [LOOK, HAND_IN]))
    client = EngineClient(sampler=scripted, weight_version=5)
    tasks = {uid: write_task(tmp_path / "tasks", f"task-{uid}").path for uid in ("0", "1")}

    settings = scripted_settings(tmp_path)
    async with generator_on(client, words, settings, max_context_tokens=1 << 20) as (generator, watched):
        output = await generator.generate(batch_of(tasks))

    check(output, watched.rollouts)
    assert output["rewards"] == [1.0] * 4
    assert output["is_last_step"] == [True] * 4
    # The rows hold the ids that the engines were given and gave, and nothing was encoded twice.
    asked = {tuple(call.prompt_ids.tolist()) for call in scripted.calls}
    for prompt, response, mask in zip(
        output["prompt_token_ids"], output["response_ids"], output["loss_masks"], strict=True
    ):
        second_turn = response.index(END) + 1
        second_prompt = prompt + response[: mask.index(1, second_turn)]
        assert {tuple(prompt), tuple(second_prompt)} <= asked
    versions = {v for r in watched.rollouts.values() for t in r.trajectory.turns for v in t.weights_versions}
    assert versions == {5}
    assert output["rollout_metrics"]["ledger/masked_tokens"] == 0


async def test_a_rollout_whose_history_was_rewritten_comes_as_several_rows_and_loses_no_token(
    tmp_path: Path,
) -> None:
    words = WordRenderer()
    client = EngineClient(sampler=ScriptedSampler(script=script_of(words, [SPLIT, HAND_IN, HAND_IN])))

    settings = scripted_settings(tmp_path)
    async with generator_on(client, words, settings, max_context_tokens=1 << 20) as (generator, watched):
        output = await generator.generate(batch_of({"0": write_task(tmp_path / "tasks").path}))

    check(output, watched.rollouts)
    branches = [len(rollout.trajectory.leaves()) for rollout in watched.rollouts.values()]
    assert min(branches) > 1
    assert len(output["response_ids"]) == sum(branches)
    assert output["is_last_step"] == [
        n == last for last in (b - 1 for b in branches) for n in range(last + 1)
    ]
    assert output["rollout_metrics"][f"branch/{BranchCause.HISTORY_REWRITTEN}"] == sum(branches) - 2


async def test_a_prompt_whose_trials_fail_has_no_reward_of_zero(tmp_path: Path) -> None:
    words = WordRenderer()
    client = EngineClient(sampler=ScriptedSampler(script=script_of(words, [HAND_IN])))
    broken = write_task(tmp_path / "tasks", "broken", test_sh="#!/bin/bash\ntrue\n")
    tasks = {"0": broken.path, "1": write_task(tmp_path / "tasks").path}

    settings = scripted_settings(tmp_path)
    async with generator_on(client, words, settings, max_context_tokens=1 << 20) as (generator, _):
        output = await generator.generate(batch_of(tasks))

    assert [identity.instance_id for identity in output["trajectory_ids"]] == ["0", "1", "1"]
    assert output["stop_reasons"] == ["reward_missing", "completed", "completed"]
    assert [sum(mask) > 0 for mask in output["loss_masks"]] == [False, True, True]
    assert output["rollout_metrics"]["reward/none_count"] == 2


async def embedded_batch(directory: Path) -> tuple[GeneratorOutput, Mapping[str, Rollout]]:
    """Return what two rollouts of the demo's policy, sampled by the embedded engine, came to."""
    recipe = load_recipe(ROOT / "recipes" / "demo.toml", ["rollouts.workers=0"])
    renderer = load_renderer(recipe.policy.model)
    engine = await LocalEngine.open(
        recipe.policy.model,
        max_context_tokens=recipe.policy.max_context_tokens,
        max_batch=4,
        stop_token_ids=renderer.stop_token_ids,
    )
    params = {**VLLM_PARAMS, "temperature": recipe.loop.sampling.temperature, "max_tokens": 32}
    batch = batch_of({"0": write_task(directory / "tasks").path}, params=params)
    try:
        async with generator_on(
            EngineClient(sampler=engine),
            renderer,
            runner_settings(recipe.rollouts, directory / "trials"),
            max_context_tokens=recipe.policy.max_context_tokens,
        ) as (generator, watched):
            return await generator.generate(batch), watched.rollouts
    finally:
        await engine.close()


async def test_the_embedded_engine_and_the_demos_policy_give_rows_that_its_trainer_would_sample(
    tmp_path: Path,
) -> None:
    output, rollouts = await embedded_batch(tmp_path)

    check(output, rollouts)
    assert output["rollout_metrics"]["ledger/trained_tokens"] > 0
    for rollout in rollouts.values():
        for turn in rollout.trajectory.turns:
            assert (turn.sampling.temperature, turn.sampling.max_tokens) == (0.85, 32)
