"""`pilotage data`."""

import argparse
import asyncio
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from pilotage.errors import ConfigError
from pilotage.files import write_atomically

if TYPE_CHECKING:
    from pilotage.datasets.swe_smith import TaskSummary, TreeSource


async def demo(arguments: argparse.Namespace) -> int:
    """Write the demo's tasks: training and held-out ones from different packages."""
    from pilotage.datasets import DEMO_HELD_OUT, DEMO_TRAIN, write_package_tasks

    out = arguments.out
    if out.exists():
        raise ConfigError(f"{out} exists already; remove it, or choose another --out")
    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    splits = (("train", DEMO_TRAIN, arguments.train), ("held_out", DEMO_HELD_OUT, arguments.held_out))
    for name, packages, count in splits:
        print(f"{name}: {count} tasks from {', '.join(packages)}", flush=True)
        await asyncio.to_thread(
            write_package_tasks, building / name, packages=packages, num_tasks=count, seed=arguments.seed
        )
    building.rename(out)
    print(f"wrote {out}")
    return 0


async def swe_smith(arguments: argparse.Namespace) -> int:
    """Write localization tasks from SWE-smith rows."""
    from rich.progress import Progress

    from pilotage.datasets.swe_smith import (
        SWE_SMITH,
        TaskOptions,
        check_rows,
        read_rows,
        write_swe_smith_tasks,
    )

    if not 0 <= arguments.held_out < 1:
        raise ConfigError(
            f"--held-out is a share of the repositories, from 0 to below 1; got {arguments.held_out}"
        )
    trees = _trees(arguments.clone_from, arguments.images_from)
    raw = read_rows(SWE_SMITH, parquet=arguments.parquet, revision=arguments.revision or "")
    if arguments.limit is not None:
        raw = itertools.islice(raw, arguments.limit)
    checked = await asyncio.to_thread(check_rows, raw, SWE_SMITH.orientation)
    print(f"{len(checked.rows)} rows can be used, {checked.drops.total()} cannot", flush=True)
    _print_counts(checked.drops)
    if not checked.rows:
        raise ConfigError("no row is left to make a task of")
    options = TaskOptions(held_out_fraction=arguments.held_out, seed=arguments.seed, empty=arguments.empty)
    tasks_directory = arguments.export_swe_smith_to or arguments.out
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("trees and tasks", total=len(checked.rows))
        summary = await asyncio.to_thread(
            write_swe_smith_tasks,
            tasks_directory,
            checked.rows,
            trees,
            options,
            on_row=lambda: progress.advance(bar),
        )
    _print_tasks(summary, tasks_directory)
    source = {"hub_id": SWE_SMITH.hub_id, "revision": arguments.revision, "parquet": arguments.parquet}
    counts = {field.name: getattr(summary, field.name) for field in fields(summary)}
    record = {"source": source, "row_drops": checked.drops, **counts}
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out / "summary.json", json.dumps(record, indent=1, default=str).encode())
    return 0 if summary.written else 1


def _cache(kind: str) -> Path:
    """Return where downloads of a kind are kept, for every command and run of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotage" / kind


def _trees(clone_from: str | None, images_from: str | None) -> "TreeSource":
    from pilotage.datasets.sdists import configured_index
    from pilotage.datasets.swe_smith import CloneTrees, ImageTrees, SdistTrees

    if clone_from is not None:
        return CloneTrees(base_url=clone_from, clones=_cache("clones"))
    if images_from is not None:
        return ImageTrees(prefix=images_from)
    return SdistTrees(index_url=configured_index(), cache=_cache("sdists"))


def _print_tasks(summary: "TaskSummary", directory: Path) -> None:
    made = summary.written.total()
    splits = f"{summary.written['train']} train, {summary.written['held_out']} held out"
    print(f"{made} tasks in {directory}: {splits}")
    print(f"{summary.num_exact} of them with exactly the files that the patch was made for")
    print(f"{summary.drops.total()} rows without a task")
    _print_counts(summary.drops)
    print(f"recomputed gold equals the row's in {made - len(summary.differences)} of {made}")
    for line in summary.differences:
        print(f"  {line}")


def _print_counts(counts: Mapping[str, int]) -> None:
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:>6}  {reason}")


async def baseline(arguments: argparse.Namespace) -> int:
    """Print what random, BM25 and identifier search score on tasks, and what a perfect answer would."""
    from pilotage.datasets import load_tasks, score_baselines
    from pilotage.localization import BASELINES

    chosen = arguments.methods or [*BASELINES, "gold"]
    if unknown := set(chosen) - {*BASELINES, "gold"}:
        raise ConfigError(f"no method {min(unknown)}; --methods are of {', '.join(BASELINES)}, gold")
    tasks = load_tasks(arguments.tasks)
    scored = await asyncio.to_thread(
        score_baselines, tasks, [method for method in BASELINES if method in chosen]
    )
    scored = [found for found in scored if found.method in chosen]
    if arguments.json:
        rows = [
            {
                "method": found.method,
                "file_f1": found.mean.file_f1,
                "module_f1": found.mean.module_f1,
                "function_f1": found.mean.function_f1,
                "reward": found.mean.total,
                "count": len(found.scores),
            }
            for found in scored
        ]
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'method':<14} {'file':>6} {'module':>6} {'func':>6} {'reward':>6}   ({len(tasks)} tasks)")
    for found in scored:
        mean = found.mean
        print(
            f"{found.method:<14} {mean.file_f1:6.3f} {mean.module_f1:6.3f} {mean.function_f1:6.3f}"
            f" {mean.total:6.3f}"
        )
    return 0


async def check(arguments: argparse.Namespace) -> int:
    """Run every task's oracle and the leak probe; exit code 1 where anything is wrong."""
    from rich.progress import Progress

    from pilotage.datasets import load_tasks
    from pilotage.ops.task_check import TaskFindings, check_tasks
    from pilotage.rollouts.environments import check_environment
    from pilotage.rollouts.register import sweep
    from pilotage.rollouts.trial import HOST_ENVIRONMENT, EnvironmentChoice

    logging.disable(logging.ERROR)  # Harbor minds that its own oracle has no web tools to take away
    tasks = load_tasks(arguments.tasks)
    name = HOST_ENVIRONMENT if arguments.environment == "host" else arguments.environment
    environment = EnvironmentChoice(name=name)
    await asyncio.to_thread(check_environment, environment)
    await asyncio.to_thread(sweep)
    with Progress(disable=not sys.stdout.isatty()) as progress, tempfile.TemporaryDirectory() as trials:
        bar = progress.add_task("oracle and leak probe", total=len(tasks))

        def on_task(found: TaskFindings) -> None:
            progress.advance(bar)
            for line in found.findings:
                progress.console.print(
                    f"{found.task.id}: {line}", markup=False, highlight=False, soft_wrap=True
                )

        checked = await check_tasks(
            tasks,
            environment=environment,
            trials=Path(trials),
            concurrency=arguments.concurrency,
            on_task=on_task,
        )
    bad = sum(bool(found.findings) for found in checked)
    print(f"{len(tasks)} tasks checked, {bad} with findings")
    return 1 if bad else 0


async def make_bugs(arguments: argparse.Namespace) -> int:
    """Make tasks from source archives, or go on making them; 1 where there is not one."""
    from pilotage.cli.progress import PackagesProgress
    from pilotage.datasets.factory import Factory
    from pilotage.datasets.factory import make_bugs as make
    from pilotage.datasets.sdists import configured_index

    factory = Factory(
        packages=arguments.packages,
        out=arguments.out,
        num_tasks=arguments.tasks,
        seed=arguments.seed,
        num_workers=os.cpu_count() or 1 if arguments.workers is None else arguments.workers,
        index_url=configured_index(),
        cache=_cache("sdists"),
        bare_issue=arguments.bare_issue,
    )
    stop = threading.Event()
    try:
        with PackagesProgress() as progress:
            made = await asyncio.to_thread(make, factory, progress, stop)
    finally:
        stop.set()  # where this was interrupted, the thread goes on until it is told
    if made.num_tasks:
        print(made.table)
    print(
        f"{made.num_tasks} tasks in {arguments.out}: {made.num_multi_place} of several places,"
        f" {made.num_name_errors} that end in a NameError; {len(made.failures)} packages gave none"
    )
    return 0 if made.num_tasks else 1


async def make_repairs(arguments: argparse.Namespace) -> int:
    """Write repair tasks from the bugs of the factory."""
    from pilotage.datasets.repair_tasks import write_repair_tasks
    from pilotage.datasets.sdists import configured_index

    count = await asyncio.to_thread(
        write_repair_tasks,
        arguments.bugs,
        arguments.out,
        index_url=configured_index(),
        cache=_cache("sdists"),
    )
    print(f"{count} repair tasks in {arguments.out}")
    return 0 if count else 1
