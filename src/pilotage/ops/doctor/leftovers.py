"""What runs that are over left on this machine, and the removal of what is surely ours.

Invariant: only three kinds of things are removed: holdings of dead owners, which their register names; tmux
servers whose own environment names a run that no process holds; and `launcher.pid` files of such runs.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pilotage import pid_lock
from pilotage.ops.launch import RUN_VARIABLE
from pilotage.processes import is_running
from pilotage.rollouts.register import Register, sweep

_TMUX_TIMEOUT_S = 2.0
_YOUNG_S = 60.0
"""A tmux server is older than its run's lock by the start of a driver; a younger one is left alone."""
_WALK_S = 2.0
"""Longest that sizes of directories are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TmuxServer:
    """A tmux server that was started for a run."""

    socket: Path
    run: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspaces:
    """Trial directories of one run that is over."""

    path: Path
    count: int
    size_bytes: int
    is_whole: bool = True
    """Whether all of it was added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What was found."""

    dead_holdings: tuple[str, ...] = ()
    dead_tmux_servers: tuple[TmuxServer, ...] = ()
    stale_locks: tuple[Path, ...] = ()
    workspaces: tuple[Workspaces, ...] = ()


def find_leftovers(runs: Path, *, now: float) -> Leftovers:
    """Look for what is left; nothing is changed.

    Args:
        now: Unix seconds.
    """
    over = [run for run in _run_directories(runs) if not is_held(run)]
    pid_files = (run / "launcher.pid" for run in over)
    holdings = Register().holdings()
    return Leftovers(
        dead_holdings=tuple(holding.id for holding in holdings if not is_running(holding.owner)),
        dead_tmux_servers=tuple(_dead_tmux_servers(now)),
        stale_locks=tuple(path for path in pid_files if path.is_file()),
        workspaces=tuple(_workspaces(over)),
    )


def remove_leftovers(runs: Path, *, now: float) -> list[str]:
    """Remove what is surely ours; returns what was done, a line each."""
    found = find_leftovers(runs, now=now)
    done: list[str] = []
    if found.dead_holdings:
        swept = sweep()
        done.append(
            f"swept {swept.holdings} holdings: {swept.killed_processes} processes,"
            f" {swept.removed_trees} directories"
        )
    for server in found.dead_tmux_servers:
        if _run_of(server.socket) == server.run and not is_held(server.run):
            _tmux(server.socket, "kill-server")
            done.append(f"ended the tmux server {server.socket.name} of {server.run}")
    for path in found.stale_locks:
        if not is_held(path.parent):
            path.unlink(missing_ok=True)
            done.append(f"removed {path}")
    return done


def is_held(run: Path) -> bool:
    """Return whether a process holds a run directory, by its `lock` or its `launcher.pid`."""
    return any(pid_lock.is_held(run / name) for name in ("lock", "launcher.pid"))


def _run_directories(runs: Path) -> list[Path]:
    return sorted(path.parent for path in runs.glob("*/config.toml"))


# --- tmux ---


def _dead_tmux_servers(now: float) -> Iterator[TmuxServer]:
    directory = Path(os.environ.get("TMUX_TMPDIR") or tempfile.gettempdir(), f"tmux-{os.getuid()}")
    with contextlib.suppress(OSError):
        for socket in sorted(path for path in directory.iterdir() if path.is_socket()):
            run = _run_of(socket)
            if run is not None and not is_held(run) and now - _started_at(socket, now) >= _YOUNG_S:
                yield TmuxServer(socket=socket, run=run)


def _run_of(socket: Path) -> Path | None:
    """Return the run that a tmux server was started for; None for everybody else's, and a dead one."""
    name, _, value = _tmux(socket, "show-environment", "-g", RUN_VARIABLE).strip().partition("=")
    return Path(value) if name == RUN_VARIABLE and value.startswith("/") else None


def _started_at(socket: Path, now: float) -> float:
    text = _tmux(socket, "display-message", "-p", "#{start_time}").strip()
    return float(text) if text.isdigit() else now


def _tmux(socket: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["tmux", "-S", str(socket), *arguments],
            capture_output=True,
            text=True,
            timeout=_TMUX_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- workspaces ---


def _workspaces(over: list[Path]) -> Iterator[Workspaces]:
    deadline = time.monotonic() + _WALK_S
    for run in over:
        trials = run / "trials"
        count = sum(1 for _ in trials.iterdir()) if trials.is_dir() else 0
        if count:
            size_bytes, is_whole = _size_bytes(trials, deadline)
            yield Workspaces(path=trials, count=count, size_bytes=size_bytes, is_whole=is_whole)


def _size_bytes(root: Path, deadline: float) -> tuple[int, bool]:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(folder, name).lstat().st_size
        if time.monotonic() > deadline:
            return total, False
    return total, True
