"""A file that is locked by its living owner and holds the owner's process id.

Invariant: whether somebody holds it is asked of the kernel, never of the id in the file; so a file that a
killed owner left, or an id that another process has got since, misleads nobody.
"""

import fcntl
import os
import time
from pathlib import Path

_PATIENCE_S = 0.2
"""Longer than `holder` of another process keeps its own lock, with which it asks."""


class PidLock:
    """A held lock; it ends with `release`, or with the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file and let go; the second call does nothing."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def acquire(path: Path) -> PidLock | None:
    """Take the lock, writing this process's id; None where a living process holds it."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _is_locked(descriptor, fcntl.LOCK_EX) and _is_at(path, descriptor):
            lock = PidLock(path, descriptor)
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except OSError:  # a full disk
                lock.release()
                raise
            return lock
        os.close(descriptor)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def is_held(path: Path) -> bool:
    """Return whether a living process holds the lock."""
    try:
        return _held_text(path) is not None
    except OSError:
        return False


def holder(path: Path) -> int | None:
    """Return the process id of the living owner, or None where there is none."""
    text = _held_text(path)
    return int(text) if text is not None and text.isdigit() else None


def _held_text(path: Path) -> bytes | None:
    """Return what the file says while a process holds it; None where it is not there, or nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if _is_locked(descriptor, fcntl.LOCK_SH) else os.pread(descriptor, 32, 0).strip()
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the locked file is still the one under that name; its last owner removes it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
