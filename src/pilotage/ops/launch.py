"""Start a run that outlives the terminal, stop it, and look at it.

Invariant: a signal goes only to the process that holds a run's lock, and a terminal server is touched only
under the name of that run. Nothing here looks for processes by their name.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotage.errors import ConfigError, PilotageError, WaitTimeoutError
from pilotage.loops.run_directory import RunDirectory
from pilotage.ops.supervisor import PROGRAM, STOP_S, refuse_second_launch
from pilotage.pid_lock import holder

RUN_VARIABLE = "PILOTAGE_RUN"
"""Set in a run's terminal server to the absolute path of the run, which makes the server ours."""
_SESSION = "run"
_START_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A run to start."""

    run: Path
    """Absolute."""
    command: tuple[str, ...]
    """Arguments of `pilotage` that train, without --resume."""
    restarts: int

    @property
    def program(self) -> list[str]:
        """The supervisor's command line."""
        return [sys.executable, "-m", PROGRAM, str(self.run), str(self.restarts), *self.command]


def terminal(run: Path, *words: str) -> list[str]:
    """Return a tmux command for the server of a run, which is named after it."""
    return ["tmux", "-L", run.name, *words]


def tmux_command(spec: LaunchSpec) -> list[str]:
    """Return the command that starts a run in a detached session of a server of its own."""
    size = ("-x", "200", "-y", "50")
    options = ("-f", "/dev/null", "new-session", "-d", "-s", _SESSION)
    return terminal(spec.run, *options, *size, "-c", os.getcwd(), "--", *spec.program)


def systemd_command(spec: LaunchSpec, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts a run as a unit of the user's systemd.

    Values stay out of the command line, where everybody could read them: systemd takes them from the caller.
    """
    names = sorted(name for name in environment if name.isidentifier())
    unit = ("systemd-run", "--user", "--collect", f"--unit={unit_name(spec.run)}")
    stop = f"TimeoutStopSec={STOP_S + 30:.0f}"
    properties = ("-p", "KillMode=mixed", "-p", stop, f"--working-directory={os.getcwd()}")
    return [*unit, *properties, *(f"--setenv={name}" for name in names), "--", *spec.program]


def unit_name(run: Path) -> str:
    """Return the name of a run's systemd unit."""
    return f"pilotage-{run.name}"


def launch(spec: LaunchSpec, *, with_systemd: bool) -> int:
    """Start a run detached and return its launcher's process id.

    Raises:
        ConfigError: this host has a launched run, tmux or systemd is missing, or the name of the terminal
            server is taken.
        PilotageError: the launcher ended at once; the message has what it said.
    """
    refuse_second_launch()
    # TMUX names the server that we may be in ourselves.
    environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    environment[RUN_VARIABLE] = str(spec.run)
    program = "systemd-run" if with_systemd else "tmux"
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not installed; install it, or run `pilotage train` in the foreground"
        )
    if not with_systemd and is_serving(spec.run):
        raise ConfigError(
            f"there is a tmux server -L {spec.run.name} already; give the run another name with --run-name"
        )
    command = systemd_command(spec, environment) if with_systemd else tmux_command(spec)
    started = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if started.returncode != 0:
        raise ConfigError(f"{program} did not start the run: {' '.join(started.stderr.split())}")
    return _launcher_of(spec, with_systemd=with_systemd)


def _launcher_of(spec: LaunchSpec, *, with_systemd: bool) -> int:
    run = RunDirectory(spec.run)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (pid := holder(run.launcher_path)) is not None:
            return pid
        if not with_systemd and not is_serving(spec.run):
            break
        time.sleep(_POLL_S)
    raise PilotageError(f"the launcher of {spec.run} ended at once; read {spec.run / 'log' / 'driver.log'}")


def is_serving(run: Path) -> bool:
    """Return whether a terminal server of the run's name is there."""
    if shutil.which("tmux") is None:
        return False
    asked = subprocess.run(terminal(run, "has-session"), capture_output=True, check=False)
    return asked.returncode == 0


def attach_command(run: Path) -> list[str]:
    """Return the command that shows a run's terminal.

    Raises:
        ConfigError: it has none.
    """
    if not is_serving(run):
        raise ConfigError(f"{run} has no terminal; `tail -f {run / 'log' / 'driver.log'}` follows its log")
    return terminal(run, "attach-session", "-t", _SESSION)


def owner(run: RunDirectory) -> int | None:
    """Return the process that a signal to stop goes to: launcher or driver; None where neither lives."""
    return holder(run.launcher_path) or holder(run.lock_path)


def stop(run: RunDirectory, *, timeout_s: float = STOP_S, on_wait: Callable[[], object]) -> bool:
    """Ask a run to stop cleanly and wait until launcher and driver are gone; returns whether it ran.

    Args:
        on_wait: called once, when the request is on its way.

    Raises:
        WaitTimeoutError: it still runs after `timeout_s`.
    """
    pid = owner(run)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGTERM)
    on_wait()
    deadline = time.monotonic() + timeout_s
    while owner(run) is not None or is_ours(run.path):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"{run.path} still runs after {timeout_s:.0f} s; its supervisor kills a driver that does not"
                f" stop in {STOP_S:.0f} s, so look again with `pilotage status {run.path}`"
            )
        time.sleep(_POLL_S)
    return True


def is_ours(run: Path) -> bool:
    """Return whether the terminal server of the run's name was started by the run's launcher."""
    if shutil.which("tmux") is None:
        return False
    words = terminal(run, "show-environment", "-g", RUN_VARIABLE)
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.strip() == f"{RUN_VARIABLE}={run.resolve()}"


def driver_command(
    recipe: Path, overrides: Sequence[str], *, run: Path, launch_environment: bool
) -> tuple[str, ...]:
    """Return the arguments of `pilotage` with which a run trains."""
    options = ["--run-name", run.name, "--runs-dir", str(run.parent)]
    if launch_environment:
        options.append("--launch-environment")
    return ("train", str(recipe), *overrides, *options)
