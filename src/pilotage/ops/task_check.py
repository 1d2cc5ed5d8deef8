"""Check tasks by running them: the oracle earns the most, doing nothing earns 0, nothing gives it away."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pilotage.datasets.baselines import read_gold
from pilotage.errors import TaskError
from pilotage.localization import EmptyLevel, Places, ceiling
from pilotage.rollouts.leak_probe import LEAK_PROBE_AGENT
from pilotage.rollouts.report import TrialReport
from pilotage.rollouts.task_validation import task_complaint
from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice, TrialSpec, run_trial
from pilotage.types import SessionAccess, Task

NO_MODEL = SessionAccess(base_url="http://127.0.0.1:9/v1", api_key="none", model="openai/none")
"""For agents that call no model."""
_TOLERANCE = 1e-9
_MAX_PROBLEM_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFindings:
    """What is wrong with one task."""

    task: Task
    findings: tuple[str, ...]
    """One line each; none where the task is good."""


async def check_task(task: Task, *, environment: EnvironmentChoice, trials: Path) -> TaskFindings:
    """Validate a task, then run its oracle and the leak probe in `environment`.

    Args:
        trials: where the trial directories are made; they are removed again.
    """
    if complaint := await asyncio.to_thread(task_complaint, task.path):
        return TaskFindings(task=task, findings=(complaint,))
    gold = _gold(task)
    files = [] if gold is None else sorted(gold[0].files)
    probe = AgentChoice(name=LEAK_PROBE_AGENT, options={"gold_files": files})
    setting = TrialSetting(environment=environment, trials=trials)
    oracle_report, probe_report = [
        await run_trial(setting.spec(task, agent)) for agent in (AgentChoice(name="oracle"), probe)
    ]
    most = most_reward(task)
    findings = [*_oracle_findings(oracle_report, most), *_probe_findings(probe_report)]
    return TaskFindings(task=task, findings=tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetting:
    """What the trials of a check share."""

    environment: EnvironmentChoice
    trials: Path
    """Where the trial directories are made."""
    access: SessionAccess = NO_MODEL
    deadlines: Deadlines = field(default_factory=Deadlines)
    reward_key: str = "reward"

    def spec(self, task: Task, agent: AgentChoice) -> TrialSpec:
        """Return one trial of `task`."""
        return TrialSpec(
            name=f"check-{uuid.uuid4().hex[:12]}",
            task_path=task.path,
            trials_directory=self.trials,
            access=self.access,
            agent=agent,
            environment=self.environment,
            deadlines=self.deadlines,
            max_turns=1,
            reward_key=self.reward_key,
        )


def _gold(task: Task) -> tuple[Places, EmptyLevel] | None:
    try:
        return read_gold(task.path)
    except TaskError:
        return None


def most_reward(task: Task) -> float | None:
    """Return the most that a localization task can give; None of any other task."""
    gold = _gold(task)
    return None if gold is None else ceiling(gold[0], empty=gold[1])


def problem_of(report: TrialReport) -> str:
    """Return in one line why a trial has no reward."""
    problem = report.reward_problem or "no reward"
    if report.fault is not None:
        problem = f"{report.fault.kind}: {report.fault.message}"
    return " ".join(problem.split())[:_MAX_PROBLEM_CHARS]


def _oracle_findings(report: TrialReport, most: float | None) -> list[str]:
    if report.reward is None:
        return [f"the oracle has no reward: {problem_of(report)}"]
    if most is not None and abs(report.reward.value - most) > _TOLERANCE:
        return [f"the oracle gets {report.reward.value:g}, and {most:g} can be had"]
    return [] if report.reward.value > 0 else ["the oracle gets 0"]


def _probe_findings(report: TrialReport) -> list[str]:
    found = report.agent.last_message.splitlines() if report.agent is not None else [problem_of(report)]
    if report.reward is None:
        return [*found, f"doing nothing has no reward: {problem_of(report)}"]
    return found if report.reward.value == 0 else [*found, f"doing nothing gets {report.reward.value:g}"]


async def check_tasks(
    tasks: Sequence[Task],
    *,
    environment: EnvironmentChoice,
    trials: Path,
    concurrency: int,
    on_task: Callable[[TaskFindings], None],
) -> list[TaskFindings]:
    """Check tasks, `concurrency` at once; in their order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> TaskFindings:
        async with slots:
            found = await check_task(task, environment=environment, trials=trials)
        on_task(found)
        return found

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in tasks]
    return [task.result() for task in running]
