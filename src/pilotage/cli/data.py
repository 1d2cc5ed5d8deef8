"""`pilotage data`."""

import argparse
import asyncio
import json
import shutil

from pilotage.errors import ConfigError


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


async def baseline(arguments: argparse.Namespace) -> int:
    """Print what random, BM25 and identifier search score on tasks, and what a perfect answer would."""
    from pilotage.datasets import load_tasks, score_baselines

    tasks = load_tasks(arguments.tasks)
    scored = await asyncio.to_thread(score_baselines, tasks)
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
