"""`pilotage doctor`: look at everything that a run needs, before it starts.

Two looks at once: at the policy and at the driver's side, each in a process of its own.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import time
from dataclasses import asdict
from pathlib import Path

from pilotage.ops.doctor.findings import Finding, Severity, in_order
from pilotage.processes import KillablePool
from pilotage.recipes import Recipe, load_recipe

_MARKS = {Severity.OK: "ok", Severity.SKIPPED: "-", Severity.WARNING: "warn", Severity.ERROR: "ERROR"}


async def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; exit code 0 where nothing stops a run, 1 where something does."""
    started = time.monotonic()
    recipe = None if arguments.recipe is None else load_recipe(arguments.recipe, arguments.overrides)
    runs: Path = arguments.runs_dir
    fixed = await asyncio.to_thread(_remove_leftovers, runs) if arguments.fix else []
    findings = in_order(await _look(runs, recipe))
    took_s = time.monotonic() - started
    if arguments.json:
        report = {"findings": [asdict(finding) for finding in findings], "fixed": fixed, "took_s": took_s}
        print(json.dumps(report, indent=2))
    else:
        _print(findings, fixed, took_s)
    return 1 if any(finding.severity is Severity.ERROR for finding in findings) else 0


def _remove_leftovers(runs: Path) -> list[str]:
    from pilotage.ops.doctor.leftovers import remove_leftovers

    return remove_leftovers(runs, now=time.time())


async def _look(runs: Path, recipe: Recipe | None) -> list[Finding]:
    loop, context = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
    # Collecting garbage between imports finds none, and takes a sixth of their time.
    with KillablePool(max_workers=2, mp_context=context, initializer=gc.disable) as pool:
        looks = [loop.run_in_executor(pool, _check_driver, runs, recipe)]
        if recipe is not None:
            looks.insert(0, loop.run_in_executor(pool, _check_policy, recipe))
        findings = [finding for found in await asyncio.gather(*looks) for finding in found]
        pool.kill_workers()  # the end of an interpreter with torch takes two seconds
    return findings


def _check_policy(recipe: Recipe) -> list[Finding]:
    from pilotage.cli.doctor_policy import check_policy

    return check_policy(recipe)


def _check_driver(runs: Path, recipe: Recipe | None) -> list[Finding]:
    from pilotage.cli.doctor_driver import check_driver

    return check_driver(runs, recipe)


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
