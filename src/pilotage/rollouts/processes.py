"""Find and kill the processes of an unsandboxed environment by the marker that they inherit.

Invariant: a process is only ever killed because its environment carries the exact marker.
"""

from pathlib import Path

from pilotage.processes import ProcessIdentity, identify, kill, wait_until_gone

_PROC = Path("/proc")
MARKER = "PILOTAGE_SANDBOX"
"""Environment variable that every process of an unsandboxed environment inherits; its value is the id."""


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
