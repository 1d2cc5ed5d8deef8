"""`pilotage doctor`: look at everything that a run needs, before it starts."""

import argparse
import asyncio
import importlib
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

from pilotage.client import Http, Patience
from pilotage.errors import PilotageError
from pilotage.ops.doctor import (
    Finding,
    FindingName,
    MachineNeed,
    SamplerNeed,
    ServiceNeed,
    Severity,
    TaskNeed,
    check_file_times,
    check_machine,
    check_service,
    find_connection,
    gather,
    in_order,
    remove_leftovers,
)
from pilotage.ops.doctor.findings import error, from_error
from pilotage.recipes import Recipe, load_recipe
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.rollouts.routes import Route
from pilotage.types import SessionAccess

_MARKS = {Severity.OK: "ok", Severity.SKIPPED: "-", Severity.WARNING: "warn", Severity.ERROR: "ERROR"}


async def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; exit code 0 where nothing stops a run, 1 where something does."""
    started = time.monotonic()
    recipe = None if arguments.recipe is None else load_recipe(arguments.recipe, arguments.overrides)
    runs: Path = arguments.runs_dir
    fixed = await asyncio.to_thread(remove_leftovers, runs, now=time.time()) if arguments.fix else []
    logging.disable(logging.WARNING)  # what is logged here is among the findings
    async with asyncio.TaskGroup() as group:
        machine = group.create_task(_machine_and_service(runs, recipe))
        path = None if recipe is None else group.create_task(_path(recipe))
    findings = in_order([*machine.result(), *(path.result() if path is not None else ())])
    took_s = time.monotonic() - started
    if arguments.json:
        report = {"findings": [asdict(finding) for finding in findings], "fixed": fixed, "took_s": took_s}
        print(json.dumps(report, indent=2))
    else:
        _print(findings, fixed, took_s)
    return 1 if any(finding.severity is Severity.ERROR for finding in findings) else 0


# --- what a recipe needs ---


def _machine_need(recipe: Recipe | None) -> MachineNeed:
    if recipe is None:
        return MachineNeed()
    rollouts = recipe.rollouts
    extras = {"agents"} | ({"local"} if recipe.backend == "local" else set())
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


def _sampler_need(recipe: Recipe) -> SamplerNeed:
    return SamplerNeed(
        max_context_tokens=recipe.policy.max_context_tokens,
        temperature=recipe.loop.sampling.temperature,
        max_tokens=recipe.loop.sampling.max_tokens,
    )


# --- looking ---


async def _machine_and_service(runs: Path, recipe: Recipe | None) -> list[Finding]:
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


async def _path(recipe: Recipe) -> list[Finding]:
    """Follow the path of a turn: template, proxy, sandbox and task, sampler."""
    from pilotage.ops.doctor.proxy import check_proxy, open_proxy
    from pilotage.ops.doctor.rendering import check_model_window, check_template, check_tool_parser

    policy = recipe.policy
    try:
        renderer = load_renderer(policy.model, enable_thinking=policy.enable_thinking)
    except PilotageError as raised:
        return [from_error(FindingName.TEMPLATE, raised, fix="give policy.model a whole model directory")]
    findings = [check_template(policy.model), check_tool_parser(renderer)]
    if (window := check_model_window(policy.model, policy.max_context_tokens)) is not None:
        return [*findings, window]
    async with open_proxy(renderer, max_context_tokens=policy.max_context_tokens) as access:
        findings.append(await check_proxy(access))
        route = recipe.rollouts.agent_route
        async with asyncio.TaskGroup() as group:
            trials = group.create_task(_trials(recipe, None if route is Route.DRIVER else access))
            sampler = group.create_task(_sampler(recipe, renderer))
    return [*findings, *trials.result(), *sampler.result()]


async def _trials(recipe: Recipe, access: SessionAccess | None) -> list[Finding]:
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


async def _sampler(recipe: Recipe, renderer: TemplateRenderer) -> list[Finding]:
    from pilotage.ops.doctor.sampler import check_sampler, skip_sampler
    from pilotage.recipes.stack import open_backend

    if recipe.backend != "local":
        return skip_sampler("a service's sampler comes with a job, and this starts none")
    try:
        # In a thread: the proxy must answer meanwhile.
        await asyncio.to_thread(importlib.import_module, "pilotage.engine.local")
        async with open_backend(recipe, recipe.policy.model, renderer, None) as engine:
            return await check_sampler(engine, renderer, _sampler_need(recipe))
    except ModuleNotFoundError as raised:
        fix = "pip install 'pilotage[local]', or make install"
        return [error(FindingName.SAMPLER, f"the local engine cannot be imported: {raised}", fix=fix)]
    except PilotageError as raised:
        return [from_error(FindingName.SAMPLER, raised, fix="give policy.model a whole model directory")]


# --- printing ---


def _print(findings: list[Finding], fixed: list[str], took_s: float) -> None:
    for line in fixed:
        print(f"fixed: {line}")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.severity]:5} {finding.name:{width}}  {finding.evidence}")
        if finding.fix:
            print(f"{'':5} {'':{width}}  fix: {finding.fix}")
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    print(
        f"{counts[Severity.ERROR]} errors, {counts[Severity.WARNING]} warnings, {counts[Severity.OK]} well,"
        f" {counts[Severity.SKIPPED]} not looked at; {took_s:.1f} s"
    )
