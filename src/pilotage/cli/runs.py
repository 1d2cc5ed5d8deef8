"""Commands that start, watch and stop runs: launch, resume, status, stop, attach."""

import argparse
import asyncio
import json
import os
from pathlib import Path

from pilotage.errors import ConfigError
from pilotage.loops.run_directory import RunDirectory


def open_run(path: Path) -> RunDirectory:
    """Return the run at `path`.

    Raises:
        ConfigError: there is none.
    """
    run = RunDirectory(path)
    if not run.config_path.is_file() and not run.launcher_path.is_file():
        raise ConfigError(f"{path} is no run directory: it has no config.toml")
    return run


async def launch(arguments: argparse.Namespace) -> int:
    """Start a run detached from this terminal."""
    from pilotage.cli.train import plan
    from pilotage.ops.launch import driver_command

    planned = plan(arguments)
    RunDirectory.check(planned.path, planned.recipe.resolved(), resume=False)
    path = planned.path.resolve()
    command = driver_command(
        arguments.recipe.resolve(),
        arguments.overrides,
        run=path,
        launch_environment=arguments.launch_environment,
    )
    return await _launch(arguments, path, command)


async def resume(arguments: argparse.Namespace) -> int:
    """Go on with a run, detached from this terminal."""
    from pilotage.ops.launch import driver_command, owner

    run = open_run(arguments.run.resolve())
    if (pid := owner(run)) is not None:
        raise ConfigError(f"{arguments.run} runs already, as process {pid}; `pilotage status` shows where")
    if not run.config_path.is_file():
        raise ConfigError(f"{arguments.run} never started; launch it again")
    command = driver_command(run.config_path, (), run=run.path, launch_environment=False)
    return await _launch(arguments, run.path, command)


async def _launch(arguments: argparse.Namespace, path: Path, command: tuple[str, ...]) -> int:
    from pilotage.ops.launch import LaunchSpec
    from pilotage.ops.launch import launch as start

    spec = LaunchSpec(run=path, command=command, restarts=arguments.restarts)
    pid = await asyncio.to_thread(start, spec, with_systemd=arguments.systemd)
    print(_launched(path, pid))
    return 0


def _launched(path: Path, pid: int) -> str:
    shown = os.path.relpath(path)
    return "\n".join(
        [
            f"launched {path.name} as process {pid}; its output goes to {shown}/log/driver.log",
            f"  pilotage status {shown}    where it stands",
            f"  pilotage attach {shown}    its terminal; Ctrl-B D leaves it running",
            f"  pilotage stop {shown}      stop, save, clean up",
        ]
    )


async def status(arguments: argparse.Namespace) -> int:
    """Print where a run, or every run, stands."""
    from pilotage.ops.status import format_status, read_status

    if arguments.run is not None:
        runs = [open_run(arguments.run)]
    else:
        found = sorted(arguments.runs_dir.glob("*/config.toml"))
        runs = [RunDirectory(config.parent) for config in found]
    statuses = [read_status(run) for run in runs]
    if arguments.json:
        print(json.dumps([each.to_json() for each in statuses], indent=1))
        return 0
    print("\n".join(map(format_status, statuses)) or f"no runs in {arguments.runs_dir}")
    return 0


async def stop(arguments: argparse.Namespace) -> int:
    """Stop a run cleanly."""
    from pilotage.ops.launch import stop as stop_run

    run = open_run(arguments.run)
    did_run = await asyncio.to_thread(
        stop_run,
        run,
        timeout_s=arguments.timeout,
        on_wait=lambda: print(f"stopping {run.path}: rollouts are dropped, the last step is saved"),
    )
    saved = run.newest_checkpoint()
    kept = "nothing was saved" if saved is None else f"saved after step {saved}"
    print(f"{run.path} has stopped; {kept}" if did_run else f"{run.path} does not run; {kept}")
    return 0


async def attach(arguments: argparse.Namespace) -> int:
    """Show a run's terminal in this one."""
    from pilotage.ops.launch import attach_command

    command = attach_command(open_run(arguments.run).path.resolve())
    environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    os.execvpe(command[0], command, environment)
