"""The synchronous loop.

    tasks of the step -> groups of rollouts -> rewards -> advantages -> one update -> publish -> next step

A step's tasks are a function of (seed, step), a rollout's seed one of (seed, rollout id): nothing about the
order needs to be saved. A step is finished when its metrics record is on disk; a checkpoint holds the
weights and the optimizer after a step. Evaluation and training use the same runner.

Cancelled, it stops cleanly: rollouts under way are dropped with their step, a step whose rollouts are there
is finished (without an evaluation under way), and the last finished step is checkpointed.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from pilotage.algorithms import build_batch
from pilotage.errors import ConfigError, PilotageError, SamplerError, TrainerError
from pilotage.interfaces import MetricSink, RolloutRunner, Trainer
from pilotage.loops.metrics import StepTimes, evaluation_metrics, step_metrics
from pilotage.loops.run_directory import RunDirectory
from pilotage.loops.settings import LoopSettings
from pilotage.types import (
    ForwardBackwardResult,
    Outcome,
    Rollout,
    RolloutRequest,
    Sample,
    SamplingParams,
    StepResult,
    Task,
)

_log = logging.getLogger(__name__)

_LAST_SAVE_S = 60.0
"""Longest time that a run which is being stopped takes to save."""


class Observer(Protocol):
    """Watches a run; shows it to a person."""

    def on_phase(self, phase: str, step: int, total: int) -> None:
        """A phase of a step begins: `total` rollouts are to come, or 0 where none are."""
        ...

    def on_rollout(self, rollout: Rollout) -> None:
        """A rollout has finished."""
        ...

    def on_record(self, record: dict[str, float]) -> None:
        """A step's record is on disk."""
        ...


def rollout_seed(seed: int, rollout_id: str) -> int:
    """Return the 63-bit seed of a rollout."""
    digest = hashlib.sha256(f"{seed}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def tasks_of_step(tasks: Sequence[Task], *, step: int, per_step: int, seed: int) -> list[Task]:
    """Return the tasks of `step` (from 1): consecutive ones of an endless row of shuffled epochs."""
    chosen: list[Task] = []
    for position in range((step - 1) * per_step, step * per_step):
        epoch, index = divmod(position, len(tasks))
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        chosen.append(tasks[order[index]])
    return chosen


def _request(
    rollout_id: str, group: str, task: Task, sampling: SamplingParams, settings: LoopSettings
) -> RolloutRequest:
    seed = rollout_seed(settings.seed, rollout_id)
    return RolloutRequest(id=rollout_id, group_id=group, task=task, sampling=replace(sampling, seed=seed))


def train_requests(tasks: Sequence[Task], *, settings: LoopSettings, step: int) -> list[RolloutRequest]:
    """Return the rollouts of a training step, group by group."""
    chosen = tasks_of_step(tasks, step=step, per_step=settings.tasks_per_step, seed=settings.seed)
    groups = [(f"step-{step:04d}-{position:02d}", task) for position, task in enumerate(chosen)]
    return [
        _request(f"{group}-{index:02d}", group, task, settings.sampling, settings)
        for group, task in groups
        for index in range(settings.group_size)
    ]


def evaluation_requests(tasks: Sequence[Task], *, settings: LoopSettings, step: int) -> list[RolloutRequest]:
    """Return one rollout of every task, at the evaluation's temperature."""
    sampling = replace(settings.sampling, temperature=settings.evaluation.temperature)
    ids = [f"eval-{step:04d}-{position:02d}" for position in range(len(tasks))]
    return [_request(name, name, task, sampling, settings) for name, task in zip(ids, tasks, strict=True)]


async def _completed[T](work: Coroutine[object, object, T]) -> T:
    """Await `work` to its end even where the caller is cancelled meanwhile; its failure comes first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _require_sampler(rollouts: Sequence[Rollout], what: str) -> None:
    """Raise SamplerError where no rollout got an answer: a step without them would be lost, not idle."""
    failures = [rollout.failure for rollout in rollouts if rollout.outcome is Outcome.SAMPLER_ERROR]
    if failures and len(failures) == len(rollouts):
        said = "" if failures[0] is None else failures[0].message
        raise SamplerError(f"the sampler failed in all {what}: {said}; mend it, then resume the run")


class SynchronousLoop:
    """Trains a policy with rollouts of its own newest weights."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        runner: RolloutRunner,
        run: RunDirectory,
        train_tasks: Sequence[Task],
        held_out_tasks: Sequence[Task],
        settings: LoopSettings,
        observer: Observer,
        sinks: Sequence[MetricSink] = (),
    ) -> None:
        """Args:
        train_tasks: at least one.
        held_out_tasks: none switches evaluation off.
        sinks: get each record once it is on disk.
        """
        if not train_tasks:
            raise ConfigError("there are no tasks to train on; give tasks.train")
        self._trainer = trainer
        self._runner = runner
        self._run_directory = run
        self._train_tasks = train_tasks
        self._held_out_tasks = held_out_tasks
        self._settings = settings
        self._rules = settings.outcome_rules()
        self._observer = observer
        self._sinks = sinks
        self._weights_version = 0
        self._last_step = -1

    async def run(self) -> None:
        """Run to the last step, from the newest checkpoint where there is one.

        Raises:
            TrainerError: a step failed, or too many steps in a row gave no gradient.
            SamplerError: no rollout of a step got an answer.
        """
        try:
            await self._run_steps(await self._start())
        except asyncio.CancelledError:
            await self._keep_last_step()
            raise
        self._run_directory.event("finished", step=self._settings.num_steps)

    async def _run_steps(self, first: int) -> None:
        idle = 0
        for step in range(first, self._settings.num_steps + 1):
            idle = 0 if await self._step(step) else idle + 1
            if idle >= self._settings.max_idle_steps:
                raise TrainerError(
                    f"no gradient in {idle} steps: every group had equal rewards, or fewer than two."
                    " Choose tasks that the policy solves sometimes, or a larger group_size"
                )

    async def _keep_last_step(self) -> None:
        """Checkpoint the last finished step, where it is not: the run is being stopped."""
        run, step = self._run_directory, self._last_step
        if step < 0:
            return
        try:
            if not run.checkpoint(step).exists():
                async with asyncio.timeout(_LAST_SAVE_S):
                    await self._trainer.save(run.checkpoint(step))
                run.event("checkpoint", step=step)
        except (PilotageError, TimeoutError) as error:
            _log.warning("step %d could not be saved (%s); resume goes on from an earlier one", step, error)
        run.event("stopped", step=step)

    async def _start(self) -> int:
        """Restore or evaluate what there is before the first step to do; return that step."""
        run = self._run_directory
        newest = run.newest_checkpoint()
        run.rewind(newest if newest is not None else -1)
        if newest is None:
            run.event("started")
            self._weights_version = await self._trainer.publish()
            record: dict[str, float] = {"step": 0, "weights_version": self._weights_version}
            await self._finish(record | await self._evaluate(0))
            return 1
        await self._trainer.load(run.checkpoint(newest))
        self._weights_version = await self._trainer.publish()
        self._last_step = newest
        run.event("resumed", step=newest)
        return newest + 1

    async def _step(self, step: int) -> bool:
        """Do one step; return whether it changed the weights."""
        started = time.monotonic()
        rollouts = await self._collect(
            train_requests(self._train_tasks, settings=self._settings, step=step), "rollouts", step
        )
        collected = time.monotonic()
        learning = asyncio.create_task(self._learn(step, rollouts, collected - started))
        evaluation: dict[str, float] = {}
        try:
            await asyncio.shield(learning)
            if self._is_due(step, self._settings.evaluation.every_steps):
                evaluation = await self._evaluate(step)
        finally:  # the weights move: whatever stops the run from here on must not lose the step
            record, has_update = await learning
            record |= evaluation | {"time/step_s": time.monotonic() - started}
            await _completed(self._finish(record))
        return has_update

    async def _learn(
        self, step: int, rollouts: Sequence[Rollout], rollouts_s: float
    ) -> tuple[dict[str, float], bool]:
        """Update and publish; return the step's record so far, and whether there was a gradient."""
        collected = time.monotonic()
        batch = build_batch(rollouts, self._rules, scale_by_std=self._settings.scale_advantages_by_std)
        self._observer.on_phase("train", step, 0)
        update = await self._update(batch.samples) if batch.samples else None
        trained = time.monotonic()
        behaviour_version = self._weights_version
        if update is not None:
            self._weights_version = await self._trainer.publish()
        times = StepTimes(
            rollouts_s=rollouts_s, train_s=trained - collected, publish_s=time.monotonic() - trained
        )
        record = step_metrics(rollouts, batch, update=update, times=times, trainer_version=behaviour_version)
        record |= {"step": step, "weights_version": self._weights_version}
        return record, update is not None

    async def _update(self, samples: Sequence[Sample]) -> tuple[ForwardBackwardResult, StepResult]:
        measured = await self._trainer.forward_backward(samples, self._settings.loss)
        return measured, await self._trainer.step(self._settings.optimizer)

    async def _evaluate(self, step: int) -> dict[str, float]:
        if not self._held_out_tasks:
            return {}
        started = time.monotonic()
        rollouts = await self._collect(
            evaluation_requests(self._held_out_tasks, settings=self._settings, step=step), "evaluation", step
        )
        return evaluation_metrics(rollouts) | {"time/evaluation_s": time.monotonic() - started}

    async def _finish(self, record: dict[str, float]) -> None:
        """Put the record on disk, then a checkpoint where one is due."""
        step = int(record["step"])
        run = self._run_directory
        run.write(record)
        self._last_step = step
        if self._is_due(step, self._settings.checkpoint_every_steps):
            await self._trainer.save(run.checkpoint(step))
            run.event("checkpoint", step=step)
        for sink in self._sinks:
            sink.write(record)
        self._observer.on_record(record)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._settings.num_steps

    # --- rollouts ---

    async def _collect(self, requests: Iterable[RolloutRequest], phase: str, step: int) -> list[Rollout]:
        """Run all requests, as many at once as the runner allows; in the order of the requests."""
        wanted = list(requests)
        folder = f"{'step' if phase == 'rollouts' else 'eval'}-{step:04d}"
        self._observer.on_phase(phase, step, len(wanted))

        async def one(request: RolloutRequest) -> Rollout:
            rollout = await self._runner.run(request)
            self._run_directory.add_rollout(folder, rollout)
            if rollout.failure is not None:
                self._run_directory.event(
                    "rollout_failed",
                    rollout=rollout.id,
                    outcome=rollout.outcome,
                    message=rollout.failure.message,
                )
            self._observer.on_rollout(rollout)
            return rollout

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in wanted]
        rollouts = [task.result() for task in tasks]
        _require_sampler(rollouts, f"{phase} of step {step}")
        return rollouts
