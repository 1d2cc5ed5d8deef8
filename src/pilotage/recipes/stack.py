"""From a recipe to running parts: engine, proxy on a socket, runner."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pilotage.client import JobPlan, open_engine, resolve_connection
from pilotage.client.tinker_losses import check_loss
from pilotage.client.tinker_sdk import check_sdk, installed_version, resolve_tinker
from pilotage.errors import ConfigError
from pilotage.interfaces import Engine, Renderer, Sampler
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.recipes.config import Recipe, RolloutSettings
from pilotage.recipes.embedded import open_local
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.rollouts import (
    AgentChoice,
    Deadlines,
    EnvironmentChoice,
    HarborRunner,
    RunnerSettings,
    TrialLimits,
    check_settings,
)
from pilotage.rollouts.host_workers import HostWorkers
from pilotage.rollouts.ray_cluster import check_ray, open_ray
from pilotage.rollouts.routes import proxy_address
from pilotage.rollouts.trial import HOST_ENVIRONMENT, OPENHANDS_AGENT
from pilotage.types import ProxyAddress
from pilotage.wire.jobs import (
    CreateJobBody,
    EngineSizes,
    InferenceConfig,
    JobExtras,
    OptimizerConfig,
    SubJobBody,
    TrainingConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a command works with while it is open."""

    engine: Engine
    renderer: TemplateRenderer
    runner: HarborRunner


def _agent(settings: RolloutSettings) -> AgentChoice:
    prompt = settings.system_prompt_file
    named = [("skills", skill) for skill in settings.skills]
    named += [] if prompt is None else [("system_prompt_file", prompt)]
    for key, path in named:
        if not path.exists():
            raise ConfigError(f"rollouts.{key}: {path} does not exist")
    directories = tuple(skill for skill in settings.skills if skill.is_dir())
    texts = [str(skill) for skill in settings.skills if not skill.is_dir()]
    if settings.agent != "openhands":
        if texts:
            raise ConfigError(f"skill {texts[0]} is no directory; only the agent openhands takes a text file")
        if settings.mcp_servers:
            raise ConfigError("rollouts.mcp_servers are for the agent openhands; configure another's itself")
        return AgentChoice(
            name=settings.agent,
            options=settings.agent_options,
            route=settings.agent_route,
            skills=directories,
        )
    options: dict[str, Any] = {"tools": list(settings.tools), "skills": texts}
    if settings.mcp_servers:
        servers = settings.mcp_servers.items()
        options["driver_mcp_servers"] = {name: server.model_dump() for name, server in servers}
    if prompt is not None:
        options["system_prompt_file"] = str(prompt)
    return AgentChoice(name=OPENHANDS_AGENT, options=options, route=settings.agent_route, skills=directories)


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
        submission_floor=settings.submission_floor,
        concurrency=settings.concurrency,
        limits=TrialLimits(
            setup_slots=settings.setup_slots,
            agent_slots=settings.agent_slots,
            verifier_slots=settings.verifier_slots,
            starts_per_s=settings.starts_per_s,
        ),
        workers=settings.workers,
        keep_trials=settings.keep_trials,
    )


def check_stack(recipe: Recipe) -> None:
    """Raise ConfigError where `open_stack` would, as far as that can be said without starting anything."""
    load_renderer(recipe.policy.model, enable_thinking=recipe.policy.enable_thinking)
    if recipe.rollouts.ray_address is None:
        check_settings(runner_settings(recipe.rollouts, Path()))
    else:  # hosts are looked at when they are there
        check_ray()
    if recipe.backend == "cortex":
        resolve_connection()
    if recipe.backend == "tinker":
        check_sdk(installed_version())
        resolve_tinker()
        check_loss(recipe.loop.loss)


def job_plan(recipe: Recipe, renderer: TemplateRenderer, run_directory: Path | None) -> JobPlan:
    """Return the job that a recipe's run needs: one trainer, one sampler, all that the run will ask."""
    policy, job, loop = recipe.policy, recipe.job, recipe.loop
    model = job.model_name or policy.model.name
    optimizer = loop.optimizer
    training = TrainingConfig(
        optimizer=OptimizerConfig(
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        ),
        gradient_clipping=optimizer.max_grad_norm,
        max_seq_len=policy.max_context_tokens,
        train_batch_size=loop.tasks_per_step * loop.group_size,
        n_gpus=job.training_gpus,
        peft_config=policy.peft_config,
    )
    sampling = InferenceConfig(
        max_seq_len=policy.max_context_tokens, n_gpus=job.sampling_gpus, peft_config=policy.peft_config
    )
    seed = None if policy.peft_config is None else loop.seed
    sizes = EngineSizes(
        max_batch=policy.max_batch,
        micro_batch_tokens=policy.micro_batch_tokens,
        trainer_threads=policy.trainer_threads,
        stop_token_ids=renderer.stop_token_ids,
    )
    body = CreateJobBody(
        sub_job_configs=(
            SubJobBody(job_type="training", model_name=model, training_config=training, seed=seed),
            SubJobBody(job_type="sampling", model_name=model, inference_config=sampling),
        ),
        hardware=job.hardware,
        idle_timeout_seconds=job.idle_timeout_s,
        comment=job.comment,
    )
    return JobPlan(
        body=body.model_copy(update={"extras": JobExtras(lease_s=job.lease_s, engine=sizes)}),
        loss=loop.loss,
        adam=optimizer,
        sampling=loop.sampling,
        startup_timeout_s=job.startup_timeout_s,
        run_directory=run_directory,
    )


@contextlib.asynccontextmanager
async def open_backend(
    recipe: Recipe, model: Path, renderer: TemplateRenderer, run_directory: Path | None
) -> AsyncGenerator[Engine]:
    """Open the recipe's trainer and sampler on `model`, this process's or a service's.

    Args:
        model: the recipe's, or a checkpoint of a run (of the same backend).
        run_directory: of a run that trains, which publishes first; gets the id of the service's job.
    """
    if recipe.backend == "tinker":
        async with _open_tinker(recipe, renderer) as session:
            if model != recipe.policy.model:
                await session.load(model)
            if run_directory is None:
                await session.publish()
            yield session
        return
    if recipe.backend == "local":
        engine = await open_local(recipe, model, renderer)
        try:
            yield engine
        finally:
            await engine.close()
        return
    async with open_engine(resolve_connection(), job_plan(recipe, renderer, run_directory)) as remote:
        if model != recipe.policy.model:
            await remote.load(model)
            await remote.publish()
        yield remote


def _open_tinker(
    recipe: Recipe, renderer: TemplateRenderer
) -> contextlib.AbstractAsyncContextManager[Engine]:
    """Open a session for the recipe's model; nothing is made in it yet."""
    check_sdk(installed_version())
    from pilotage.client.tinker_engine import TinkerPlan
    from pilotage.client.tinker_session import open_tinker

    plan = TinkerPlan(
        base_model=recipe.tinker.model_name or recipe.policy.model.name,
        lora_rank=recipe.tinker.lora_rank,
        lora_seed=recipe.tinker.lora_seed,
        max_context_tokens=recipe.policy.max_context_tokens,
        stop_token_ids=renderer.stop_token_ids,
        loss=recipe.loop.loss,
        startup_timeout_s=recipe.tinker.startup_timeout_s,
    )
    return open_tinker(resolve_tinker(), plan)


@contextlib.asynccontextmanager
async def open_runner(
    recipe: Recipe,
    sampler: Sampler,
    renderer: Renderer,
    trials_directory: Path,
    *,
    registry: CollectorRegistry | None = None,
) -> AsyncGenerator[HarborRunner]:
    """Serve a proxy in front of `sampler` and run rollouts against it while the context is open.

    Args:
        registry: gets what the proxy measures.

    Raises:
        ConfigError: trials cannot run on this machine, or on the hosts of the recipe's cluster.
    """
    proxy = ChatCompletionsProxy(sampler, renderer)
    if registry is not None:
        registry.register(proxy.measures)
    settings = runner_settings(recipe.rollouts, trials_directory)
    async with contextlib.AsyncExitStack() as stack:
        pool, address = None, proxy_address(recipe.rollouts.proxy_address, recipe.rollouts.proxy_url)
        if recipe.rollouts.ray_address is not None:
            cluster = await stack.enter_async_context(open_ray(recipe.rollouts.ray_address))
            pool = HostWorkers(cluster=cluster, settings=settings, shared=_read(recipe))
            address = ProxyAddress(host=cluster.address)
        await stack.enter_async_context(serve(proxy, address))
        yield await stack.enter_async_context(HarborRunner(sessions=proxy, settings=settings, pool=pool))


def _read(recipe: Recipe) -> list[Path]:
    """Return what trials of a recipe read."""
    rollouts = recipe.rollouts
    prompt = [] if rollouts.system_prompt_file is None else [rollouts.system_prompt_file]
    return [*recipe.tasks.train, *recipe.tasks.held_out, *rollouts.skills, *prompt]


@contextlib.asynccontextmanager
async def open_stack(
    recipe: Recipe,
    *,
    model: Path,
    trials_directory: Path,
    run_directory: Path | None = None,
    registry: CollectorRegistry | None = None,
) -> AsyncGenerator[Stack]:
    """Open engine, proxy and runner for a recipe; all of it is gone when the context ends.

    Args:
        registry: gets what the proxy measures.

    Raises:
        ConfigError: the model, its template, the sandbox or the service's connection cannot be used.
        ServiceError: the service refused the job, or the job failed.
    """
    renderer = load_renderer(recipe.policy.model, enable_thinking=recipe.policy.enable_thinking)
    async with (
        open_backend(recipe, model, renderer, run_directory) as engine,
        open_runner(recipe, engine, renderer, trials_directory, registry=registry) as runner,
    ):
        yield Stack(engine=engine, renderer=renderer, runner=runner)
