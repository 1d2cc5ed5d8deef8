"""The register of what rollouts hold on this machine, and the sweep that clears what a dead owner left.

Each holding (a sandbox, a trial directory) is one small file in a directory that only this user can read,
written before it is used and removed after it is gone. Invariant: `sweep` touches a holding only if the
process that owns it, by id and start time, no longer runs; so two drivers on one machine never meet.
"""

import contextlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pilotage.errors import ConfigError
from pilotage.processes import ProcessIdentity, identify, is_running, kill, wait_until_gone
from pilotage.rollouts.processes import kill_marked

_log = logging.getLogger(__name__)

_WRITING_S = 60.0
"""A file that is still unfinished after so long was left by a killed writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Something that must not outlive its owner."""

    id: str
    owner: ProcessIdentity
    processes: tuple[ProcessIdentity, ...] = ()
    """Namespace holders: their end ends everything inside."""
    tree: str = ""
    """Absolute directory to remove; empty where there is none."""
    is_marked: bool = False
    """Whether processes carry the marker of `id` instead of living in a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep found and cleared."""

    holdings: int = 0
    """Holdings whose owner was gone."""
    killed_processes: int = 0
    removed_trees: int = 0


def default_directory() -> Path:
    """Return this user's private directory for registers, on a file system that a reboot clears."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "pilotage"
    return Path(tempfile.gettempdir()) / f"pilotage-{os.getuid()}"


def private_directory(path: Path) -> Path:
    """Make `path`, or check that it is a directory of this user's that nobody else can enter.

    Raises:
        ConfigError: it is a link, another user's, or open to others.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a directory of yours with mode 0700; remove it, or set XDG_RUNTIME_DIR to one"
        )
    return path


def current_process() -> ProcessIdentity:
    """Return the identity of this process."""
    me = identify(os.getpid())
    assert me is not None
    return me


class Register:
    """One directory of holdings."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = private_directory(directory or default_directory())

    def write(self, holding: Holding) -> None:
        """Store or replace one holding, atomically."""
        path = self._path(holding.id)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(holding)))
        partial.replace(path)

    def remove(self, holding_id: str) -> None:
        """Forget one holding."""
        self._path(holding_id).unlink(missing_ok=True)

    def holdings(self) -> list[Holding]:
        """Return every holding; a file that cannot be read is reported and skipped."""
        found: list[Holding] = []
        for path in sorted(self.directory.glob("*.json")):
            try:
                found.append(_decode(json.loads(path.read_text())))
            except FileNotFoundError:  # its owner has just let go
                continue
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("register file %s is unreadable (%s); remove it by hand", path, error)
        return found

    def sweep(self) -> SweepReport:
        """Kill and remove whatever a dead owner left; leave everything else alone."""
        holdings = killed = trees = 0
        for holding in self.holdings():
            if is_running(holding.owner):
                continue
            holdings += 1
            killed += sum(kill(process) for process in holding.processes)
            wait_until_gone(holding.processes, timeout_s=5.0)
            killed += kill_marked(holding.id) if holding.is_marked else 0
            trees += bool(holding.tree) and remove_tree(Path(holding.tree))
            self.remove(holding.id)
        for partial in self.directory.glob("*.partial"):
            with contextlib.suppress(FileNotFoundError):  # its writer has just finished it
                if time.time() - partial.stat().st_mtime > _WRITING_S:
                    partial.unlink()
        return SweepReport(holdings=holdings, killed_processes=killed, removed_trees=trees)

    def _path(self, holding_id: str) -> Path:
        return self.directory / f"{holding_id}.json"


def remove_tree(path: Path) -> bool:
    """Remove a directory tree, parts that were made unwritable included; returns whether it existed."""
    if not path.exists():
        return False
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for directory, names, _ in os.walk(path):  # walks into what chmod has just opened
            for name in (".", *names):
                with_link = Path(directory, name)
                if not with_link.is_symlink():
                    with_link.chmod(0o700)
        shutil.rmtree(path)
    return True


def sweep(directory: Path | None = None) -> SweepReport:
    """Clear what earlier, dead drivers of this user left on this machine; run it at every start."""
    report = Register(directory).sweep()
    if report.holdings:
        _log.info(
            "swept %d leftovers: %d processes killed, %d trees removed",
            report.holdings,
            report.killed_processes,
            report.removed_trees,
        )
    return report


def _decode(raw: dict[str, Any]) -> Holding:
    return Holding(
        id=raw["id"],
        owner=ProcessIdentity(**raw["owner"]),
        processes=tuple(ProcessIdentity(**process) for process in raw["processes"]),
        tree=raw["tree"],
        is_marked=raw["is_marked"],
    )
