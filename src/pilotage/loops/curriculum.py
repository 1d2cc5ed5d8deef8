"""Choose tasks by pass rate, and remember what was chosen.

A group teaches by the differences between its rollouts. With pass rate p their variance is p (1 - p): most
where half of them solve the task, none where all or nobody does. A task is drawn in proportion to it; one
that has not been tried counts as the best, and every task keeps a small share, since the policy changes.

A choice is on disk before the group's rollouts start, and a pass rate once they have ended. Taken up again, a
run works on what it had chosen, and a synchronous one goes on to choose as if it had not been interrupted.

Source: the variance of a group as the measure of what it teaches, arXiv:2506.09016 section 3.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pilotage.errors import RunDirectoryError
from pilotage.loops.run_directory import RunDirectory
from pilotage.types import Rollout, Task

_LEAST = 0.1
"""Weight of a task that all rollouts solve, or none; 1 is the most."""
_GROUPS_AVERAGED = 2
"""A pass rate is the mean over so many of the task's newest groups."""


class CurriculumSettings(BaseModel):
    """Tasks are drawn by how often they are solved, instead of each once an epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_reward: float = Field(default=1.0, gt=0)
    """Reward of a rollout that solves its task whole: 3 for localization. A pass rate is a mean reward as a
    share of it."""


class Curriculum:
    """Draws the task of each group."""

    def __init__(
        self, tasks: Sequence[Task], settings: CurriculumSettings, *, seed: int, run: RunDirectory
    ) -> None:
        """Take up what the run has written.

        Raises:
            RunDirectoryError: a group that was begun works on a task that is not among `tasks`.
        """
        self._tasks = {task.id: task for task in tasks}
        self._max_reward = settings.max_reward
        self._seed = seed
        self._run = run
        self._chosen: dict[int, str] = {}
        self._open: dict[int, str] = {}
        """Of the groups under way in this process."""
        self._pass_rates: dict[str, dict[int, float]] = {task.id: {} for task in tasks}
        """By group, of each task."""
        for record in run.group_records():
            number, task_id, rate = record["group"], record["task"], record.get("pass_rate")
            if task_id not in self._tasks:
                raise RunDirectoryError(
                    f"{run.groups_path}: group {number} works on {task_id}, which tasks.train lacks"
                )
            self._chosen[number] = task_id
            if rate is not None:
                self._pass_rates[task_id][number] = rate

    def task_of(self, number: int) -> Task:
        """Return the task of a group that starts now."""
        task_id = self._chosen.get(number)
        if task_id is None:
            task_id = self._chosen[number] = self._draw(number)
            self._run.write_group(number, task_id)
        self._open[number] = task_id
        return self._tasks[task_id]

    def finish(self, number: int, rollouts: Iterable[Rollout]) -> None:
        """A group's rollouts have all ended; those without a reward say nothing of the task."""
        task_id = self._open.pop(number)
        rewards = [rollout.reward.value for rollout in rollouts if rollout.reward is not None]
        if rewards:
            pass_rate = float(np.clip(np.array(rewards) / self._max_reward, 0, 1).mean())
            self._pass_rates[task_id][number] = pass_rate
            self._run.write_group(number, task_id, pass_rate)

    def pass_rate(self, task_id: str) -> float | None:
        """Return a task's pass rate over its newest groups, from 0 to 1; None where it has none."""
        rates = self._pass_rates[task_id]
        newest = sorted(rates)[-_GROUPS_AVERAGED:]
        return float(np.mean([rates[number] for number in newest])) if newest else None

    def _draw(self, number: int) -> str:
        """Draw among the tasks that no group under way works on, or among all where there are none."""
        busy = set(self._open.values())
        candidates = [task_id for task_id in self._tasks if task_id not in busy] or list(self._tasks)
        weights = np.array([self._weight(task_id) for task_id in candidates])
        rng = np.random.default_rng([self._seed, number])
        return candidates[rng.choice(len(candidates), p=weights / weights.sum())]

    def _weight(self, task_id: str) -> float:
        rate = self.pass_rate(task_id)
        return 1.0 if rate is None else max(4 * rate * (1 - rate), _LEAST)
