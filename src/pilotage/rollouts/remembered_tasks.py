"""Keep what Harbor computes from a task directory for as long as the directory stays as it is.

Every trial hashes its whole task twice, through path objects that cost a third of a millisecond a file: more
CPU than the agent's conversation. Rollouts of one task follow each other, so each worker computes the two
digests once. Invariant: what is returned is Harbor's own value for these very files; a file that was added,
removed or written since (by name, size, mode and time) makes it compute again.
"""

import os
from collections.abc import Callable
from pathlib import Path

from harbor.models.task.task import Task
from harbor.publisher.packager import Packager

type _Signature = tuple[tuple[str, int, int, int], ...]


def _signature(directory: Path) -> _Signature:
    """Return path, size, mode and time of change of everything below `directory`."""
    entries: list[tuple[str, int, int, int]] = []
    pending = [str(directory)]
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                status = entry.stat(follow_symlinks=False)
                entries.append((entry.path, status.st_size, status.st_mode, status.st_mtime_ns))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return tuple(sorted(entries))


class Remembered[T]:
    """One value a directory: the one of its latest state. Links count as links, not as what they point to."""

    def __init__(self) -> None:
        self._values: dict[Path, tuple[_Signature, T]] = {}

    def value(self, directory: Path, compute: Callable[[], T]) -> T:
        """Return what `compute` returned for the directory as it is now."""
        signature = _signature(directory)
        known = self._values.get(directory)
        if known is None or known[0] != signature:
            known = self._values[directory] = (signature, compute())
        return known[1]


def remember_digests() -> None:
    """Make this process remember Harbor's two digests of a task; call it once."""
    checksums, hashes = Remembered[str](), Remembered[tuple[str, list[Path]]]()
    harbor_checksum: Callable[[Task], str] = Task.checksum.fget  # pyright: ignore
    harbor_hash = Packager.compute_content_hash

    def checksum(task: Task) -> str:
        return checksums.value(task.task_dir, lambda: harbor_checksum(task))

    def content_hash(task_dir: Path) -> tuple[str, list[Path]]:
        return hashes.value(task_dir, lambda: harbor_hash(task_dir))

    Task.checksum = property(checksum)  # pyright: ignore
    Packager.compute_content_hash = staticmethod(content_hash)  # pyright: ignore
