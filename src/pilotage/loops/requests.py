"""Which rollouts a run asks for. All of it follows from the seed and a number, so none of it is saved.

Training goes along an endless row of groups: group n is the n-th task of epochs that are shuffled each for
itself (unless a curriculum chooses it), and its rollouts are named after where it stands, `step-0003-01` for
the second group of the third step. Where groups overtake each other the step that trains one may be another.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pilotage.loops.settings import LoopSettings
from pilotage.types import RolloutRequest, Task


def rollout_seed(seed: int, rollout_id: str) -> int:
    """Return the 63-bit seed of a rollout."""
    digest = hashlib.sha256(f"{seed}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def task_of_group(tasks: Sequence[Task], number: int, *, seed: int) -> Task:
    """Return the task of the group with that number, from 0, where every epoch holds each task once."""
    epoch, index = divmod(number, len(tasks))
    return tasks[np.random.default_rng([seed, epoch]).permutation(len(tasks))[index]]


def folder_of_group(number: int, *, tasks_per_step: int) -> str:
    """Return the folder that the rollouts of a group are written to."""
    return f"step-{number // tasks_per_step + 1:04d}"


def id_of_group(number: int, *, tasks_per_step: int) -> str:
    """Return the name of a group, with which the names of its rollouts begin."""
    folder = folder_of_group(number, tasks_per_step=tasks_per_step)
    return f"{folder}-{number % tasks_per_step:02d}"


def group_requests(task: Task, number: int, *, settings: LoopSettings) -> list[RolloutRequest]:
    """Return the rollouts of the group with that number, which works on `task`."""
    group = id_of_group(number, tasks_per_step=settings.tasks_per_step)
    return [
        _request(f"{group}-{index:02d}", group, task, settings=settings, temperature=None)
        for index in range(settings.group_size)
    ]


def evaluation_requests(tasks: Sequence[Task], *, settings: LoopSettings, step: int) -> list[RolloutRequest]:
    """Return one rollout of every task, at the evaluation's temperature."""
    ids = [f"eval-{step:04d}-{position:02d}" for position in range(len(tasks))]
    return [
        _request(name, name, task, settings=settings, temperature=settings.evaluation.temperature)
        for name, task in zip(ids, tasks, strict=True)
    ]


def _request(
    rollout_id: str, group: str, task: Task, *, settings: LoopSettings, temperature: float | None
) -> RolloutRequest:
    sampling = replace(settings.sampling, seed=rollout_seed(settings.seed, rollout_id))
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    return RolloutRequest(id=rollout_id, group_id=group, task=task, sampling=sampling)
