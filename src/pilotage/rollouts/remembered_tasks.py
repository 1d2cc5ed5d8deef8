"""Keep what Harbor computes from a task directory for as long as the directory stays as it is.

Every trial hashes its whole task twice and looks through its verifier's files six times, through path objects
that cost a third of a millisecond a file: more CPU than the agent's conversation. Rollouts of one task follow
each other, so each worker does it once. Invariant: what is returned is Harbor's own value for these very
files; a file that was added, removed or written since (by name, size, mode and time) makes it compute again.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from harbor.models.task.file_filter import TaskFileFilter
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task
from harbor.publisher.packager import Packager
from harbor.utils.file_selection import FileSelection

type _Signature = tuple[tuple[str, int, int, int], ...]


def _signature(directory: Path) -> _Signature:
    """Return path, mode, size and time of change of everything below `directory`."""
    entries: list[tuple[str, int, int, int]] = []
    pending = [str(directory)]
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                status = entry.stat(follow_symlinks=False)
                entries.append((entry.path, status.st_mode, status.st_size, status.st_mtime_ns))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return tuple(sorted(entries))


class Remembered[T]:
    """One value a directory: the one of its latest state. Links count as links, not as what they point to."""

    def __init__(self) -> None:
        self._values: dict[Path, tuple[_Signature, T]] = {}

    def value(self, directory: Path, compute: Callable[[], T], *, follows_links: bool = False) -> T:
        """Return what `compute` returned for the directory as it is now.

        Args:
            follows_links: `compute` looks at what links point to: with a link inside, nothing is remembered.
        """
        if not directory.is_dir():
            return compute()
        signature = _signature(directory)
        if follows_links and any(stat.S_ISLNK(mode) for _, mode, _, _ in signature):
            return compute()
        known = self._values.get(directory)
        if known is None or known[0] != signature:
            known = self._values[directory] = (signature, compute())
        return known[1]


def remember_tasks() -> None:
    """Make this process remember what Harbor finds in a task directory; call it once."""
    _remember_digests()
    _remember_inputs()


def _remember_digests() -> None:
    checksums, hashes = Remembered[str](), Remembered[tuple[str, list[Path]]]()
    harbor_checksum: Callable[[Task], str] = Task.checksum.fget  # pyright: ignore
    harbor_hash = Packager.compute_content_hash

    def checksum(task: Task) -> str:
        return checksums.value(task.task_dir, lambda: harbor_checksum(task))

    def content_hash(task_dir: Path) -> tuple[str, list[Path]]:
        return hashes.value(task_dir, lambda: harbor_hash(task_dir))

    Task.checksum = property(checksum)  # pyright: ignore
    Packager.compute_content_hash = staticmethod(content_hash)  # pyright: ignore


def _remember_inputs() -> None:
    """Remember which of the verifier's and the solution's files are inputs, and that none leads outside.

    A check that fails raises and is not remembered. The rules, `.harborignore`, lie inside the directories.
    """
    selections, checked = Remembered[FileSelection](), Remembered[None]()
    select, check = TaskFileFilter.select, TaskPaths.validate_input_tree

    def remembered_select(self: TaskFileFilter, source_dir: Path) -> FileSelection:
        return selections.value(source_dir, lambda: select(self, source_dir), follows_links=True)

    def remembered_check(
        self: TaskPaths, path: Path, *, exclude: Callable[[Path], bool] | None = None
    ) -> None:
        if exclude is None:
            return check(self, path)
        return checked.value(path, lambda: check(self, path, exclude=exclude), follows_links=True)

    TaskFileFilter.select = remembered_select
    TaskPaths.validate_input_tree = remembered_check
