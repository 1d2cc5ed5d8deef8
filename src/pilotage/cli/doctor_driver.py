"""The doctor's look at the driver's side: machine, training service, proxy, and the trials of one task."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from pilotage.client import Http, Patience
from pilotage.errors import ConfigError, PilotageError
from pilotage.ops.doctor.facts import gather
from pilotage.ops.doctor.findings import Finding, FindingName, from_error
from pilotage.ops.doctor.machine import check_file_times, check_machine
from pilotage.ops.doctor.need import MachineNeed, ServiceNeed, TaskNeed
from pilotage.ops.doctor.service import check_service, find_connection
from pilotage.recipes import Recipe
from pilotage.rollouts.routes import Route, proxy_address
from pilotage.types import SessionAccess


def check_driver(runs: Path, recipe: Recipe | None) -> list[Finding]:
    """Judge everything but the policy. For a process of its own: it has its own event loop."""
    logging.disable(logging.WARNING)  # what is logged here is among the findings
    return asyncio.run(_check_driver(runs, recipe))


async def _check_driver(runs: Path, recipe: Recipe | None) -> list[Finding]:
    async with asyncio.TaskGroup() as group:
        tasks = None if recipe is None else group.create_task(_check_proxy_and_tasks(recipe))
        machine = group.create_task(_check_machine_and_service(runs, recipe))
    return [*machine.result(), *(tasks.result() if tasks is not None else ())]


async def _check_machine_and_service(runs: Path, recipe: Recipe | None) -> list[Finding]:
    machine_need, service_need = _machine_need(recipe), _service_need(recipe)
    facts = await asyncio.to_thread(gather, runs, machine_need)
    findings = check_machine(facts, machine_need)
    connection = find_connection(service_need)
    if isinstance(connection, Finding):
        return [*findings, connection, check_file_times(facts)]
    async with Http(connection, patience=Patience(total_s=2.0)) as http:
        findings += await check_service(
            http, service_need, has_live_driver=bool(facts.drivers), now=time.time()
        )
    if all(finding.name is not FindingName.CLOCK for finding in findings):
        findings.append(check_file_times(facts))
    return findings


async def _check_proxy_and_tasks(recipe: Recipe) -> list[Finding]:
    """Judge the proxy, and the tasks by two trials; nothing where the template cannot be used."""
    from pilotage.ops.doctor.proxy import check_proxy, open_proxy
    from pilotage.rendering import load_renderer

    policy = recipe.policy
    try:
        renderer = load_renderer(policy.model, enable_thinking=policy.enable_thinking)
    except PilotageError:
        return []  # the look at the policy says it
    rollouts = recipe.rollouts
    address = proxy_address(rollouts.proxy_address, rollouts.proxy_url)
    async with contextlib.AsyncExitStack() as stack:
        opening = open_proxy(renderer, max_context_tokens=policy.max_context_tokens, address=address)
        try:
            access = await stack.enter_async_context(opening)
        except ConfigError as raised:
            return [from_error(FindingName.PROXY, raised, fix="set rollouts.proxy_address")]
        proxy = await check_proxy(access)
        is_inside = rollouts.agent_route is not Route.DRIVER
        return [proxy, *await _check_trials(recipe, access if is_inside else None)]


async def _check_trials(recipe: Recipe, access: SessionAccess | None) -> list[Finding]:
    from pilotage.ops.doctor.trials import check_trials
    from pilotage.recipes.stack import runner_settings

    settings = runner_settings(recipe.rollouts, Path())
    need = TaskNeed(
        train=recipe.tasks.train,
        held_out=recipe.tasks.held_out,
        agent=settings.agent,
        environment=settings.environment,
        deadlines=settings.deadlines,
        reward_key=settings.reward_key,
    )
    return await check_trials(need, access)


def _machine_need(recipe: Recipe | None) -> MachineNeed:
    if recipe is None:
        return MachineNeed()
    rollouts = recipe.rollouts
    extras = {"agents"} | ({recipe.backend} & {"local", "tinker"})
    extras |= set() if rollouts.ray_address is None else {"hosts"}
    return MachineNeed(
        concurrency=rollouts.concurrency,
        extras=tuple(sorted(extras)),
        has_sandbox=rollouts.environment == "host" and not rollouts.unsandboxed,
        directories=() if rollouts.trials_directory is None else (rollouts.trials_directory,),
    )


def _service_need(recipe: Recipe | None) -> ServiceNeed:
    if recipe is None or recipe.backend != "cortex":
        return ServiceNeed()
    job = recipe.job
    return ServiceNeed(
        is_required=True,
        hardware=job.hardware,
        num_gpus=job.training_gpus + job.sampling_gpus,
        comment=job.comment,
    )
