"""Commands that run rollouts: train, eval, rollout, warmstart."""

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pilotage.errors import ConfigError
from pilotage.recipes import Recipe, load_recipe
from pilotage.recipes.environment import environment_overrides, run_directory, translated
from pilotage.recipes.reference import describe_recipe
from pilotage.types import Task

if TYPE_CHECKING:
    from pilotage.loops import RunDirectory
    from pilotage.trackers import TrackedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run is to do, checked as far as can be without starting it."""

    recipe: Recipe
    path: Path
    train_tasks: list[Task]
    held_out_tasks: list[Task]


def plan(arguments: argparse.Namespace) -> Plan:
    """Read the recipe and the tasks of a run, and refuse what could not work; nothing is written.

    Raises:
        ConfigError: recipe, tasks, model, environment or connection cannot be used.
    """
    from pilotage.datasets import load_tasks, overlaps
    from pilotage.rollouts.task_validation import check_tasks
    from pilotage.trackers import check_trackers

    overrides: list[str] = arguments.overrides
    launch = os.environ if arguments.launch_environment else {}
    if arguments.launch_environment:
        overrides = [*environment_overrides(launch), *translated(overrides)]
    recipe = load_recipe(arguments.recipe, overrides)
    check_trackers(recipe.logger)
    path = run_directory(launch, arguments.runs_dir, arguments.run_name or recipe.name)
    train_tasks, held_out = load_tasks(recipe.tasks.train), load_tasks(recipe.tasks.held_out)
    if shared := overlaps(train_tasks, held_out):
        raise ConfigError(
            f"{len(shared)} held-out tasks overlap with training: {shared[0]}; remove them from one side"
        )
    check_tasks([*train_tasks, *held_out])
    from pilotage.recipes.stack import check_stack

    check_stack(recipe)
    return Plan(recipe=recipe, path=path, train_tasks=train_tasks, held_out_tasks=held_out)


async def train(arguments: argparse.Namespace) -> int:
    """Train by a recipe into a run directory."""
    from prometheus_client import CollectorRegistry

    from pilotage.cli.progress import TerminalObserver
    from pilotage.loops import RunDirectory, TrainingLoop
    from pilotage.ops.graph import write_reward_graph
    from pilotage.ops.traces import traced
    from pilotage.recipes.stack import open_stack
    from pilotage.trackers import TrackerName, open_trackers
    from pilotage.trackers.prometheus import NewestRecord, serve_metrics

    planned = plan(arguments)
    recipe, path = planned.recipe, planned.path
    registry, newest = CollectorRegistry(), NewestRecord(path.name)
    registry.register(newest)
    observer = TerminalObserver(
        num_steps=recipe.loop.num_steps, prints_records=TrackerName.CONSOLE in recipe.logger
    )
    with (
        RunDirectory.open(path, recipe.resolved(), resume=arguments.resume) as run,
        observer,
        traced(observer, run=path.name) as watcher,
        open_trackers(recipe.logger, _tracked(run, recipe), partial(_tracker_failed, run)) as sinks,
        serve_metrics(registry, recipe.metrics_port) if recipe.metrics_port else contextlib.nullcontext(),
    ):
        observer.say(f"run {path}: policy {recipe.policy.model}{_origin(recipe.policy.model)}")
        for line in describe_recipe(recipe.resolved()):
            observer.say(line)
        counts = f"{len(planned.train_tasks)} training tasks, {len(planned.held_out_tasks)} held out"
        observer.say(f"{counts}; starting workers")
        async with (
            _terminable(),
            open_stack(
                recipe,
                model=recipe.policy.model,
                trials_directory=recipe.rollouts.trials_directory or path / "trials",
                run_directory=path,
                registry=registry,
            ) as stack,
        ):
            loop = TrainingLoop(
                trainer=stack.engine,
                runner=stack.runner,
                run=run,
                train_tasks=planned.train_tasks,
                held_out_tasks=planned.held_out_tasks,
                settings=recipe.loop,
                observer=watcher,
                sinks=[*sinks, newest],
            )
            await loop.run()
        write_reward_graph(path / "reward_graph.svg", {path.name: run.metrics()}, window=5)
    return 0


def _tracked(run: "RunDirectory", recipe: Recipe) -> "TrackedRun":
    """Return what trackers are told: of a run that is resumed, the records that its loop will keep."""
    from pilotage.trackers import TrackedRun

    return TrackedRun(
        name=run.path.name,
        project=recipe.name,
        directory=run.path / "trackers",
        config=recipe.resolved(),
        records=run.kept_metrics(),
    )


def _tracker_failed(run: "RunDirectory", name: str, message: str) -> None:
    run.event("tracker_failed", tracker=name, message=message)


def _origin(model: Path) -> str:
    return " (warm-started, as shipped)" if (model / "warm_start.json").is_file() else ""


@contextlib.asynccontextmanager
async def _terminable() -> AsyncGenerator[None]:
    """Let SIGTERM end the command as Ctrl-C does: by cancelling it, so that everything is cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    terminated = False

    def on_signal() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    try:
        yield
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def _trials_directory(recipe: Recipe) -> Generator[Path]:
    """Make a directory that is gone afterwards, inside the recipe's where it names one."""
    parent = recipe.rollouts.trials_directory
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pilotage-trials-", dir=parent) as directory:
        yield Path(directory)


def _model(recipe: Recipe, policy: Path | None) -> Path:
    if policy is not None and not policy.is_dir():
        raise ConfigError(f"{policy} is not a directory; give a checkpoint or a Hugging Face model directory")
    return policy or recipe.policy.model


async def evaluate(arguments: argparse.Namespace) -> int:
    """Run every held-out task once and print mean reward and outcomes."""
    from pilotage.datasets import load_tasks
    from pilotage.loops.metrics import evaluation_metrics
    from pilotage.loops.requests import evaluation_requests
    from pilotage.rollouts.task_validation import check_tasks

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    tasks = load_tasks(recipe.tasks.held_out)
    if not tasks:
        raise ConfigError("there is nothing to evaluate; give tasks.held_out")
    check_tasks(tasks)
    from pilotage.recipes.stack import open_stack

    requests = evaluation_requests(tasks, settings=recipe.loop, step=0)
    with _trials_directory(recipe) as trials:
        model = _model(recipe, arguments.policy)
        async with _terminable(), open_stack(recipe, model=model, trials_directory=trials) as stack:
            rollouts = await asyncio.gather(*map(stack.runner.run, requests))
    for rollout in rollouts:
        reward = "none" if rollout.reward is None else f"{rollout.reward.value:.3f}"
        print(f"{rollout.task_id:<40} {rollout.outcome:<20} {reward}")
    metrics = evaluation_metrics(rollouts)
    if "eval/reward_mean" not in metrics:
        print("no rollout has a reward")
        return 1
    interval = f" +- {metrics['eval/reward_ci95']:.3f}" if "eval/reward_ci95" in metrics else ""
    print(f"mean reward {metrics['eval/reward_mean']:.3f}{interval} over {metrics['eval/count']:.0f} tasks")
    return 0


async def rollout(arguments: argparse.Namespace) -> int:
    """Run one trial of one task; exit code 0 if it has a reward."""
    from pilotage.datasets import load_tasks
    from pilotage.ops.show import format_rollout
    from pilotage.rollouts.task_validation import check_tasks
    from pilotage.types import RolloutRequest

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    tasks = load_tasks([arguments.task])
    if len(tasks) != 1:
        raise ConfigError(f"{arguments.task} holds {len(tasks)} tasks; give the directory of one")
    check_tasks(tasks)
    from pilotage.recipes.stack import open_stack

    sampling = replace(recipe.loop.sampling, seed=recipe.loop.seed)
    request = RolloutRequest(id="rollout", group_id="rollout", task=tasks[0], sampling=sampling)
    here = recipe.rollouts.model_copy(update={"workers": 0, "ray_address": None})
    recipe = recipe.model_copy(update={"rollouts": here})
    with _trials_directory(recipe) as trials:
        model = _model(recipe, arguments.policy)
        async with _terminable(), open_stack(recipe, model=model, trials_directory=trials) as stack:
            finished = await stack.runner.run(request)
            print(format_rollout(finished, stack.renderer.decode))
    return 0 if finished.reward is not None else 1


async def warm_start(arguments: argparse.Namespace) -> int:
    """Build a policy to start from."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from pilotage.recipes.warmstart import warm_start as build

    async with _terminable():
        await build(recipe, arguments.out, model=arguments.model, report=lambda line: print(line, flush=True))
    print(f"wrote {arguments.out}")
    return 0
