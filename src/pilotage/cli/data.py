"""`pilotage data`."""

import argparse
import asyncio
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
