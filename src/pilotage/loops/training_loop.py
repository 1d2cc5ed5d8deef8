"""The training loop.

    groups of rollouts -> rewards -> advantages -> one update -> publish -> the next batch of groups

Rollouts of several steps may be under way at once; `schedule` says which, and `max_lag` how far they may fall
behind. With 0 the loop is synchronous. Weights are published while rollouts are under way: each token carries
the version that sampled it.

A rollout is on disk once it has ended, a step is finished when its metrics record is, and a checkpoint holds
the weights and the optimizer after a step, with the position that the run then has along the row of groups.
Taken up again, a run trains the rollouts that it has, and asks only for those that it lacks. Evaluation and
training use the same runner.

Cancelled, it stops cleanly: rollouts under way are dropped, a step whose rollouts are there is finished
(without an evaluation under way), and the last finished step is checkpointed.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Protocol

from pilotage.algorithms import build_batch, mask_stale
from pilotage.errors import ConfigError, PilotageError, SamplerError, TrainerError
from pilotage.interfaces import MetricSink, RolloutRunner, Trainer
from pilotage.loops.curriculum import Curriculum
from pilotage.loops.metrics import StepTimes, evaluation_metrics, step_metrics
from pilotage.loops.requests import (
    evaluation_requests,
    folder_of_group,
    group_requests,
    id_of_group,
    task_of_group,
)
from pilotage.loops.run_directory import RunDirectory, TrainedGroups
from pilotage.loops.schedule import Position, Schedule
from pilotage.loops.settings import LoopSettings
from pilotage.types import ForwardBackwardResult, Outcome, Rollout, RolloutRequest, Sample, StepResult, Task

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


def _now() -> float:
    """Return the event loop's time, which a test may simulate."""
    return asyncio.get_running_loop().time()


class TrainingLoop:
    """Trains a policy with rollouts of its own weights, the newest or those of a few steps before."""

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
        self._rules = settings.batch_rules()
        self._observer = observer
        self._sinks = sinks
        self._weights_version = 0
        self._last_step = -1
        self._schedule = self._schedule_from(None)
        self._curriculum = (
            None
            if settings.curriculum is None
            else Curriculum(train_tasks, settings.curriculum, seed=settings.seed, run=run)
        )
        self._groups: dict[int, asyncio.Task[list[Rollout]]] = {}
        """Groups that no step has trained yet."""
        self._group_ended = asyncio.Event()
        self._writing = asyncio.Lock()
        """Files of a run have one writer at a time."""

    async def run(self) -> None:
        """Run to the last step, from the newest checkpoint where there is one.

        Raises:
            TrainerError: a step failed, or too many steps in a row gave no gradient.
            SamplerError: no rollout of a step got an answer.
        """
        try:
            try:
                await self._run_steps(await self._start())
            finally:
                await self._drop_groups()
        except asyncio.CancelledError:
            await self._keep_last_step()
            raise
        self._run_directory.event("finished", step=self._settings.num_steps)

    async def _run_steps(self, first: int) -> None:
        idle = 0
        for step in range(first, self._settings.num_steps + 1):
            idle = 0 if await self._step(step) else idle + 1
            if idle >= self._settings.max_idle_steps:
                raise _no_gradient(f"{idle} steps")

    async def _keep_last_step(self) -> None:
        """Checkpoint the last finished step, where it is not: the run is being stopped."""
        run, step = self._run_directory, self._last_step
        if step < 0:
            return
        try:
            if not run.checkpoint(step).exists():
                async with asyncio.timeout(_LAST_SAVE_S):
                    await self._save(step)
        except (PilotageError, TimeoutError) as error:
            _log.warning("step %d could not be saved (%s); resume goes on from an earlier one", step, error)
        run.event("stopped", step=step)

    async def _start(self) -> int:
        """Restore or evaluate what there is before the first step to do; return that step."""
        run = self._run_directory
        newest = run.newest_checkpoint()
        run.rewind(newest if newest is not None else -1)
        self._schedule = self._schedule_from(newest)
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

    def _schedule_from(self, newest: int | None) -> Schedule:
        settings, run = self._settings, self._run_directory
        return Schedule(
            per_step=settings.tasks_per_step,
            num_steps=settings.num_steps,
            max_lag=settings.max_lag,
            stragglers=settings.stragglers,
            position=run.position(newest) if newest is not None else Position(),
        )

    async def _step(self, step: int) -> bool:
        """Do one step; return whether it changed the weights."""
        started = _now()
        self._observer.on_phase("rollouts", step, self._settings.tasks_per_step * self._settings.group_size)
        numbers = await self._next_batch()
        rollouts = [rollout for number in numbers for rollout in self._groups.pop(number).result()]
        _require_sampler(rollouts, f"rollouts of step {step}")
        names = [id_of_group(number, tasks_per_step=self._settings.tasks_per_step) for number in numbers]
        trained = TrainedGroups(step=step, trainer_version=self._weights_version, groups=names)
        learning = asyncio.create_task(self._learn(trained, rollouts, rollouts_s=_now() - started))
        evaluation: dict[str, float] = {}
        try:
            await asyncio.shield(learning)
            if self._is_due(step, self._settings.evaluation.every_steps):
                evaluation = await self._evaluate(step)
        finally:  # the weights move: whatever stops the run from here on must not lose the step
            record, has_update = await learning
            record |= evaluation | {"time/step_s": _now() - started}
            await _completed(self._finish(record))
        return has_update

    async def _learn(
        self, groups: TrainedGroups, rollouts: Sequence[Rollout], *, rollouts_s: float
    ) -> tuple[dict[str, float], bool]:
        """Update and publish; return the step's record so far, and whether there was a gradient."""
        collected = _now()
        settings = self._settings
        whole = build_batch(rollouts, self._rules)
        batch = mask_stale(whole, trainer_version=groups.trainer_version, max_lag=settings.max_lag)
        self._run_directory.write_trained(groups)
        self._observer.on_phase("train", groups.step, 0)
        update = await self._update(groups.step, batch.samples) if batch.samples else None
        trained = _now()
        if update is not None:
            self._weights_version = await self._trainer.publish()
        times = StepTimes(rollouts_s=rollouts_s, train_s=trained - collected, publish_s=_now() - trained)
        record = step_metrics(
            rollouts, batch, update=update, times=times, trainer_version=groups.trainer_version
        )
        record |= {
            "step": groups.step,
            "weights_version": self._weights_version,
            "queue/open_groups": self._schedule.num_open,
            "queue/ready_groups": self._schedule.num_ready,
        }
        return record, update is not None

    async def _update(self, step: int, samples: Sequence[Sample]) -> tuple[ForwardBackwardResult, StepResult]:
        measured = await self._trainer.forward_backward(samples, self._settings.loss)
        if measured.trainer_logprobs_n is not None:
            write = self._run_directory.write_trainer_logprobs  # a thread: the proxy shares the loop
            await asyncio.to_thread(write, step, samples, measured.trainer_logprobs_n)
        return measured, await self._trainer.step(self._settings.optimizer_at(step))

    async def _evaluate(self, step: int) -> dict[str, float]:
        if not self._held_out_tasks:
            return {}
        started = _now()
        requests = evaluation_requests(self._held_out_tasks, settings=self._settings, step=step)
        self._observer.on_phase("evaluation", step, len(requests))
        rollouts = await _all(self._run_rollout(f"eval-{step:04d}", request) for request in requests)
        _require_sampler(rollouts, f"evaluation of step {step}")
        return evaluation_metrics(rollouts) | {"time/evaluation_s": _now() - started}

    async def _finish(self, record: dict[str, float]) -> None:
        """Put the record on disk, then a checkpoint where one is due."""
        step = int(record["step"])
        self._run_directory.write(record)
        self._last_step = step
        if step:
            self._schedule.finish_step()
        if self._is_due(step, self._settings.checkpoint_every_steps):
            await self._save(step)
        for sink in self._sinks:
            sink.write(record)
        self._observer.on_record(record)

    async def _save(self, step: int) -> None:
        """Checkpoint `step`, the last finished one; where the run stands is on disk first."""
        run = self._run_directory
        run.write_position(self._schedule.position)
        await self._trainer.save(run.checkpoint(step))
        run.event("checkpoint", step=step)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._settings.num_steps

    # --- rollouts ---

    async def _next_batch(self) -> tuple[int, ...]:
        """Return the groups of the next step once they are done, and keep as many under way as may be."""
        limit = self._settings.max_idle_steps * self._settings.tasks_per_step
        while True:
            self._start_groups()
            if (numbers := self._schedule.take()) is not None:
                return numbers
            if self._schedule.set_aside_in_a_row >= limit:
                raise _no_gradient(f"{limit} groups")
            await self._group_ended.wait()
            self._group_ended.clear()
            for task in self._groups.values():
                if task.done():
                    task.result()  # what ended a group other than its end ends the run

    def _start_groups(self) -> None:
        while (number := self._schedule.start()) is not None:
            self._groups[number] = asyncio.create_task(self._run_group(number, self._task_of(number)))

    def _task_of(self, number: int) -> Task:
        if self._curriculum is not None:
            return self._curriculum.task_of(number)
        return task_of_group(self._train_tasks, number, seed=self._settings.seed)

    async def _run_group(self, number: int, task: Task) -> list[Rollout]:
        """Run those rollouts of a group that are not on disk; in the order of the requests."""
        settings = self._settings
        folder = folder_of_group(number, tasks_per_step=settings.tasks_per_step)
        try:
            rollouts = await _all(
                self._kept_or_run(folder, request)
                for request in group_requests(task, number, settings=settings)
            )
            if self._curriculum is not None:
                self._curriculum.finish(number, rollouts)
            counts = not settings.refill or bool(build_batch(rollouts, self._rules).samples)
            self._schedule.finish(number, counts=counts)
            return rollouts
        finally:
            self._group_ended.set()

    async def _kept_or_run(self, folder: str, request: RolloutRequest) -> Rollout:
        kept = await asyncio.to_thread(self._run_directory.kept_rollout, folder, request)
        if kept is None:
            return await self._run_rollout(folder, request)
        self._observer.on_rollout(kept)
        return kept

    async def _run_rollout(self, folder: str, request: RolloutRequest) -> Rollout:
        rollout = await self._runner.run(request)
        await _completed(self._keep(folder, rollout))
        if rollout.failure is not None:
            self._run_directory.event(
                "rollout_failed", rollout=rollout.id, outcome=rollout.outcome, message=rollout.failure.message
            )
        self._observer.on_rollout(rollout)
        return rollout

    async def _keep(self, folder: str, rollout: Rollout) -> None:
        """Put a rollout on disk, without holding up the proxy that shares the event loop."""
        async with self._writing:
            await asyncio.to_thread(self._run_directory.add_rollout, folder, rollout)

    async def _drop_groups(self) -> None:
        """Cancel the groups under way, and wait until they are gone."""
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        self._groups.clear()


def _no_gradient(span: str) -> TrainerError:
    return TrainerError(
        f"no gradient in {span}: every group had equal rewards, or fewer than two."
        " Choose tasks that the policy solves sometimes, or a larger group_size"
    )


async def _all[T](works: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Await all, at the same time; where one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]
