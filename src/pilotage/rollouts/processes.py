"""Name, find and kill processes of this machine, safely against reused process ids.

Invariant: a process is only ever killed under the identity that was recorded for it, its id together
with its start time, or because its environment carries the exact marker of a sandbox. Nothing here looks
at the name or the command line of a process.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
MARKER = "PILOTAGE_SANDBOX"
"""Environment variable that every process of an unsandboxed environment inherits; its value is the id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process, for as long as the machine is up."""

    pid: int
    started_ticks: int
    """Clock ticks between boot and the start of the process; tells it from a later owner of the id."""


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process, or None where none runs under that id."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    is_zombie = fields[0] in "ZX"
    return None if is_zombie else ProcessIdentity(pid=pid, started_ticks=int(fields[19]))


def is_running(process: ProcessIdentity) -> bool:
    """Return whether exactly this process still runs."""
    return identify(process.pid) == process


def kill(process: ProcessIdentity) -> bool:
    """Send SIGKILL to exactly this process; returns whether it was still running."""
    if not is_running(process):
        return False
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(processes: Iterable[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait until none of `processes` runs; returns those that still do after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    remaining = [process for process in processes if is_running(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(0.005)
        remaining = [process for process in remaining if is_running(process)]
    return remaining


def marked(sandbox_id: str) -> list[ProcessIdentity]:
    """Return the running processes whose initial environment carries the marker of `sandbox_id`."""
    needle = f"{MARKER}={sandbox_id}".encode()
    found: list[ProcessIdentity] = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if needle in environment.split(b"\0") and (process := identify(int(entry.name))) is not None:
            found.append(process)
    return found


def kill_marked(sandbox_id: str) -> int:
    """Kill every process that carries the marker, until none is left; returns how many were killed."""
    killed = 0
    for _ in range(20):  # a process may fork while the list is read
        processes = marked(sandbox_id)
        if not processes:
            break
        killed += sum(kill(process) for process in processes)
        wait_until_gone(processes, timeout_s=1.0)
    return killed
