"""Judge a recipe's tasks and environment by two trials of one task: its oracle, and doing nothing.

They run in a process of their own, because the proxy must answer meanwhile.
"""

import asyncio
import gc
import logging
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pilotage.datasets import load_tasks, overlaps
from pilotage.errors import ConfigError, TaskError
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error, ok
from pilotage.ops.doctor.need import TaskNeed
from pilotage.ops.task_check import NO_MODEL, TrialSetting, most_reward, problem_of
from pilotage.rollouts.environments import check_environment
from pilotage.rollouts.report import TrialReport
from pilotage.rollouts.routes import Route, check_route
from pilotage.rollouts.task_validation import check_tasks
from pilotage.rollouts.trial import HOST_ENVIRONMENT, OUR_AGENTS, AgentChoice, run_trial
from pilotage.types import SessionAccess, Task

_ROUTE_FAULT = "RouteError"
_TOLERANCE = 1e-9


async def check_trials(need: TaskNeed, access: SessionAccess | None) -> list[Finding]:
    """Check tasks, environment and route in another process.

    Args:
        access: of the proxy that an agent inside the environment must reach; None tries no route.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=gc.disable) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, _check_trials, need, access)


def _check_trials(need: TaskNeed, access: SessionAccess | None) -> list[Finding]:
    logging.disable(logging.ERROR)  # Harbor minds that its own oracle has no web tools to take away
    return asyncio.run(check_trials_here(need, access))


async def check_trials_here(need: TaskNeed, access: SessionAccess | None) -> list[Finding]:
    """Check tasks, environment and route in this process; what is wrong before a trial ends the check."""
    try:
        tasks = _usable_tasks(need)
    except TaskError as raised:
        return [from_error(FindingName.TASKS, raised, fix="give tasks.train and tasks.held_out")]
    findings = [ok(FindingName.TASKS, f"{len(tasks)} tasks, training and held-out apart")]
    try:
        if need.environment.name != HOST_ENVIRONMENT:
            check_environment(need.environment)
            findings.append(ok(FindingName.SANDBOX, f"{need.environment.name} can be used"))
    except ConfigError as raised:
        fix = "install what it names, or set rollouts.environment"
        return [*findings, from_error(FindingName.SANDBOX, raised, fix=fix)]
    try:
        if need.agent.name not in OUR_AGENTS or need.agent.route is not Route.DRIVER:
            check_route(need.agent.name, need.agent.route)
    except ConfigError as raised:
        return [*findings, from_error(FindingName.PROXY, raised, fix="set rollouts.agent_route")]
    return [*findings, *await _try_out(tasks[0], need, access)]


def _usable_tasks(need: TaskNeed) -> list[Task]:
    train, held_out = load_tasks(need.train), load_tasks(need.held_out)
    if not train:
        raise TaskError("there is nothing to train on; give tasks.train")
    if shared := overlaps(train, held_out):
        raise TaskError(
            f"{len(shared)} held-out tasks overlap with training: {shared[0]}; remove them from one side"
        )
    check_tasks([*train, *held_out])
    return train + held_out


async def _try_out(task: Task, need: TaskNeed, access: SessionAccess | None) -> list[Finding]:
    """Run the oracle, by the route of the recipe's agent, beside an agent that does nothing."""
    route = Route.DRIVER if access is None else need.agent.route
    with tempfile.TemporaryDirectory(prefix="pilotage-doctor-") as directory:
        setting = TrialSetting(
            environment=need.environment,
            trials=Path(directory),
            access=access or NO_MODEL,
            deadlines=need.deadlines,
            reward_key=need.reward_key,
        )
        oracle, idle = await asyncio.gather(
            run_trial(setting.spec(task, AgentChoice(name="oracle", route=route))),
            run_trial(setting.spec(task, AgentChoice(name="nop"))),
        )
    findings = judge_ends(task, oracle, idle)
    if route is not Route.DRIVER:
        findings.append(_judge_route(oracle, route))
    return findings


def _judge_route(oracle: TrialReport, route: Route) -> Finding:
    if oracle.fault is not None and oracle.fault.kind == _ROUTE_FAULT:
        return error(
            FindingName.PROXY,
            f"by {route}: {problem_of(oracle)}",
            fix="put python3 into the environment, or set rollouts.agent_route",
        )
    return ok(FindingName.PROXY, f"answers inside the environment, by {route}")


def judge_ends(task: Task, oracle: TrialReport, idle: TrialReport) -> list[Finding]:
    """Judge the two trials of a task."""
    look = f"look at the task with `pilotage data check {task.path}`"
    most = most_reward(task)
    best = None if oracle.reward is None else oracle.reward.value
    if best is None:
        found = error(
            FindingName.ORACLE, f"{task.id}: the oracle has no reward: {problem_of(oracle)}", fix=look
        )
    elif best <= 0 or (most is not None and best < most - _TOLERANCE):
        could = "more than 0" if most is None else f"{most:g}"
        found = error(
            FindingName.ORACLE, f"{task.id}: the oracle earns {best:g}, and {could} can be had", fix=look
        )
    else:
        found = ok(FindingName.ORACLE, f"{task.id}: the oracle earns {best:g}")
    return [found, _judge_idle(task, idle, best=best, look=look)]


def _judge_idle(task: Task, idle: TrialReport, *, best: float | None, look: str) -> Finding:
    if idle.reward is None:
        return error(
            FindingName.NO_OP, f"{task.id}: doing nothing has no reward: {problem_of(idle)}", fix=look
        )
    if best is not None and idle.reward.value >= best:
        return error(
            FindingName.NO_OP,
            f"{task.id}: doing nothing earns {idle.reward.value:g}, as much as the oracle",
            fix=look,
        )
    return ok(FindingName.NO_OP, f"{task.id}: doing nothing earns {idle.reward.value:g}")
