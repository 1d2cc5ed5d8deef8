"""The facts of a machine that the checks judge, and the one place that gathers them.

Invariant: gathering changes nothing. A file's lock is tried shared, for an instant.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from pilotage.errors import ConfigError
from pilotage.ops.doctor.leftovers import Leftovers, find_leftovers
from pilotage.ops.doctor.need import MachineNeed
from pilotage.rollouts.sandbox import check_programs

_DISTRIBUTION = "pilotage"
_RUN_EXTRAS = ("local", "agents", "tinker", "hosts")
"""Extras whose packages take part in a run."""
_PROGRAM_TIMEOUT_S = 3.0
_PROC = Path("/proc")
_TRIAL_PROJECT = re.compile(r"-\d+-[0-9a-f]{8}__env$|^check-[0-9a-f]{12}__env$")
"""What a trial's compose project is called: Harbor's ending after our names of trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFact:
    """One dependency that we declare."""

    name: str
    wanted: str
    """Specifier of the tested versions."""
    installed: str | None
    extra: str = ""
    """Empty for what is always needed."""
    is_tested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFact:
    """Space where files of a run go."""

    path: Path
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFact:
    """A process that drives a run."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was measured; a limit of None is none."""

    python: str
    python_wanted: str
    packages: tuple[PackageFact, ...]
    open_files_limit: int | None
    open_files_most: int | None
    """What the soft limit may be raised to."""
    inotify_in_use: int
    inotify_instances: int | None
    inotify_watches: int | None
    user_namespaces: int | None
    may_unshare: bool
    """Whether the kernel lets users without privileges make user namespaces."""
    sandbox_complaint: ConfigError | None
    terminals_in_use: int
    terminals_limit: int | None
    disks: tuple[DiskFact, ...]
    leftovers: Leftovers
    drivers: tuple[DriverFact, ...]
    left_networks: tuple[str, ...]
    newest_file_ahead_s: float
    """How far the newest file of the runs lies in the future."""


def gather(runs: Path, need: MachineNeed) -> MachineFacts:
    """Measure this machine.

    Args:
        runs: the directory of the runs; it need not exist.
    """
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    return MachineFacts(
        python=platform.python_version(),
        python_wanted=metadata(_DISTRIBUTION)["Requires-Python"],
        packages=tuple(_packages()),
        open_files_limit=soft,
        open_files_most=hard,
        inotify_in_use=_inotify_in_use(),
        inotify_instances=_kernel_number("fs/inotify/max_user_instances"),
        inotify_watches=_kernel_number("fs/inotify/max_user_watches"),
        user_namespaces=_kernel_number("user/max_user_namespaces"),
        may_unshare=os.getuid() == 0 or _kernel_number("kernel/unprivileged_userns_clone") != 0,
        sandbox_complaint=_sandbox_complaint() if need.has_sandbox else None,
        terminals_in_use=_kernel_number("kernel/pty/nr") or 0,
        terminals_limit=_kernel_number("kernel/pty/max"),
        disks=tuple(_disk(path) for path in dict.fromkeys((runs, *need.directories))),
        leftovers=find_leftovers(runs, now=time.time()),
        drivers=tuple(_drivers()),
        left_networks=_left_networks(),
        newest_file_ahead_s=_newest_file_ahead_s(runs),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _kernel_number(name: str) -> int | None:
    try:
        return int((_PROC / "sys" / name).read_text())
    except (OSError, ValueError):  # another kernel, or one without the feature
        return None


def _packages() -> Iterator[PackageFact]:
    """Yield our dependencies with what is installed of them; packages of other extras are not of a run."""
    for text in requires(_DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.name == _DISTRIBUTION:
            continue
        marker = requirement.marker
        extras = ("", *_RUN_EXTRAS) if marker is not None else ("",)
        extra = next((e for e in extras if marker is None or marker.evaluate({"extra": e})), None)
        if extra is None:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        yield PackageFact(
            name=requirement.name,
            wanted=str(requirement.specifier),
            installed=installed,
            extra=extra,
            is_tested=installed is not None and requirement.specifier.contains(installed, prereleases=True),
        )


def _inotify_in_use() -> int:
    """Return how many inotify instances this user's processes hold."""
    count = 0
    for process in _own_processes():
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                count += os.readlink(descriptor) == "anon_inode:inotify"
            except OSError:  # closed meanwhile
                continue
    return count


def _own_processes() -> Iterator[Path]:
    for entry in _PROC.iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                yield entry
        except OSError:  # gone meanwhile
            continue


def _sandbox_complaint() -> ConfigError | None:
    try:
        check_programs()
    except ConfigError as error:
        return error
    return None


def _disk(path: Path) -> DiskFact:
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return DiskFact(path=path, free_bytes=shutil.disk_usage(existing).free)


def _drivers() -> Iterator[DriverFact]:
    """Yield the drivers of this user; a command that this process is part of is none."""
    mine = _ancestry(os.getpid())
    for process in _own_processes():
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        if int(process.name) not in mine and is_driver(words):
            yield DriverFact(pid=int(process.name), command=" ".join(words))


def _ancestry(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def is_driver(words: list[str]) -> bool:
    """Return whether a command line is `pilotage train ...` or a run's supervisor, itself or by a Python."""
    program, *rest = words
    if Path(program).name.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
        if rest[:2] == ["-m", "pilotage.cli.supervisor"]:
            return True
        if rest[:2] == ["-m", "pilotage"]:
            rest = rest[1:]
        elif not rest or Path(rest[0]).name != "pilotage":
            return False
        rest = rest[1:]
    elif Path(program).name != "pilotage":
        return False
    return next((word for word in rest if not word.startswith("-")), "") == "train"


def _left_networks() -> tuple[str, ...]:
    """Return the networks of trials that no container uses; none where there is no docker."""
    if shutil.which("docker") is None:
        return ()
    label = "com.docker.compose.project"
    columns = '{{.Name}}\t{{.Label "' + label + '"}}'
    networks = _printed("docker", "network", "ls", "--filter", f"label={label}", "--format", columns)
    found = [line.partition("\t")[::2] for line in networks.splitlines()]
    ours = {name: project for name, project in found if _TRIAL_PROJECT.search(project)}
    if not ours:
        return ()
    used = set(_printed("docker", "ps", "--all", "--format", '{{.Label "' + label + '"}}').splitlines())
    return tuple(sorted(name for name, project in ours.items() if project not in used))


def _printed(*command: str) -> str:
    """Return what a program printed; nothing where it failed, as docker does without its daemon."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _newest_file_ahead_s(runs: Path) -> float:
    times = [path.stat().st_mtime for path in runs.glob("*/*.jsonl")]
    return max([0.0, *(at - time.time() for at in times)])
