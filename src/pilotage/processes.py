"""Name and kill processes of this machine, safely against reused process ids.

Invariant: a process is only ever killed under the identity that was recorded for it: its id together with
its start time. Nothing here looks at the name or the command line of a process.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


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


class KillablePool(ProcessPoolExecutor):
    """A process pool that can be ended at once: for workers that hold nothing and nobody waits for."""

    def kill_workers(self) -> None:
        """Kill this pool's processes, and no other child, as the method of this name in Python 3.14."""
        workers = list(self._processes.values())
        self.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()


def end_with_parent(number: signal.Signals, *, parent: int) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Args:
        parent: process id of the parent; where it has ended already, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
