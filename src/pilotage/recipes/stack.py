"""From a recipe to running parts: engine, proxy on a socket, runner."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.engine import LocalEngine
from pilotage.interfaces import Sampler
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.recipes.config import Recipe, RolloutSettings
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.rollouts import AgentChoice, Deadlines, EnvironmentChoice, HarborRunner, RunnerSettings
from pilotage.rollouts.trial import HOST_ENVIRONMENT, OPENHANDS_AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a command works with while it is open."""

    engine: LocalEngine
    renderer: TemplateRenderer
    runner: HarborRunner


def _agent(settings: RolloutSettings) -> AgentChoice:
    if settings.agent != "openhands":
        return AgentChoice(name=settings.agent, options=settings.agent_options)
    options: dict[str, Any] = {"tools": list(settings.tools), "skills": [str(p) for p in settings.skills]}
    if settings.system_prompt_file is not None:
        options["system_prompt_file"] = str(settings.system_prompt_file)
    return AgentChoice(name=OPENHANDS_AGENT, options=options)


def _environment(settings: RolloutSettings) -> EnvironmentChoice:
    options: Mapping[str, Any] = settings.environment_options
    if settings.environment != "host":
        return EnvironmentChoice(name=settings.environment, options=options)
    if settings.unsandboxed:
        options = {**options, "unsandboxed": True}
    return EnvironmentChoice(name=HOST_ENVIRONMENT, options=options)


def runner_settings(settings: RolloutSettings, trials_directory: Path) -> RunnerSettings:
    """Return the runner's settings for a recipe's rollouts."""
    return RunnerSettings(
        trials_directory=trials_directory,
        agent=_agent(settings),
        environment=_environment(settings),
        deadlines=Deadlines(
            agent_s=settings.agent_deadline_s,
            verifier_s=settings.verifier_deadline_s,
            trial_s=settings.trial_deadline_s,
        ),
        max_turns=settings.max_turns,
        reward_key=settings.reward_key,
        expects_hand_in=settings.expects_hand_in,
        concurrency=settings.concurrency,
        workers=settings.workers,
        keep_trials=settings.keep_trials,
    )


async def open_engine(recipe: Recipe, model: Path, renderer: TemplateRenderer) -> LocalEngine:
    """Open the local engine on `model` with the recipe's sizes."""
    policy = recipe.policy
    return await LocalEngine.open(
        model,
        max_context_tokens=policy.max_context_tokens,
        max_batch=policy.max_batch,
        stop_token_ids=renderer.stop_token_ids,
        trainer_threads=policy.trainer_threads,
        micro_batch_tokens=policy.micro_batch_tokens,
    )


@contextlib.asynccontextmanager
async def open_runner(
    recipe: Recipe, sampler: Sampler, renderer: TemplateRenderer, trials_directory: Path
) -> AsyncGenerator[HarborRunner]:
    """Serve a proxy in front of `sampler` and run rollouts against it while the context is open."""
    proxy = ChatCompletionsProxy(sampler, renderer)
    settings = runner_settings(recipe.rollouts, trials_directory)
    async with serve(proxy), HarborRunner(sessions=proxy, settings=settings) as runner:
        yield runner


@contextlib.asynccontextmanager
async def open_stack(recipe: Recipe, *, model: Path, trials_directory: Path) -> AsyncGenerator[Stack]:
    """Open engine, proxy and runner for a recipe; all of it is gone when the context ends.

    Raises:
        ConfigError: the model, its template or the sandbox cannot be used.
    """
    renderer = load_renderer(recipe.policy.model, enable_thinking=recipe.policy.enable_thinking)
    engine = await open_engine(recipe, model, renderer)
    try:
        async with open_runner(recipe, engine, renderer, trials_directory) as runner:
            yield Stack(engine=engine, renderer=renderer, runner=runner)
    finally:
        await engine.close()
