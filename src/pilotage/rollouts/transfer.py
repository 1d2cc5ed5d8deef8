"""Copy files between this machine and a sandbox's root directory without following a single link.

A command inside may turn any path into a link, a pipe or a device. Followed from outside, `/logs/x ->
/etc/shadow` would be read from, or written to, this machine. So every path is opened part by part relative
to the sandbox's root with O_NOFOLLOW, only plain files are copied, and what is copied out is bounded.
"""

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pilotage.errors import PilotageError

MAX_FILE_BYTES = 64 * 2**20
"""A larger file is not copied out; NAME.omitted says so in its place."""
MAX_TREE_BYTES = 512 * 2**20
"""No more than this is copied out of one directory tree."""
MAX_DEPTH = 64
_BYTECODE = ("__pycache__", ".pyc")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TransferError(PilotageError):
    """A path in the sandbox cannot be copied from or to."""


def _parts(path: str) -> tuple[str, ...]:
    pure = PurePosixPath("/", path)
    if ".." in pure.parts:
        raise TransferError(f"{path}: a transfer needs a path without '..'")
    return pure.parts[1:]


def _open_directory(root: Path, parts: tuple[str, ...], *, create: bool) -> int:
    """Return a descriptor of the directory; the caller closes it."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the root itself may be a link
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=descriptor)
            child = os.open(part, _DIRECTORY_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = child
    except OSError as error:
        os.close(descriptor)
        raise _explained(error, "/" + "/".join(parts)) from error
    return descriptor


def _explained(error: OSError, path: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path} does not exist in the sandbox")
    return TransferError(f"{path} in the sandbox: {error.strerror}; links and special files are not followed")


def is_directory(root: Path, path: str) -> bool:
    """Return whether `path` is a directory in the sandbox, reached without links."""
    try:
        os.close(_open_directory(root, _parts(path), create=False))
    except (FileNotFoundError, TransferError):
        return False
    return True


def write_file(root: Path, target: str, source: Path, *, mtime: float | None = None) -> None:
    """Copy one file of this machine to `target` in the sandbox, replacing what is there."""
    *parents, name = _parts(target)
    directory = _open_directory(root, tuple(parents), create=True)
    try:
        _write(directory, name, source, mtime)
    finally:
        os.close(directory)


def _write(directory: int, name: str, source: Path, mtime: float | None) -> None:
    _remove(directory, name)
    mode = (source.stat().st_mode & 0o777) | 0o600
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(source, "rb") as reader, open(os.open(name, flags, mode, dir_fd=directory), "wb") as writer:
        shutil.copyfileobj(reader, writer)
        os.fchmod(writer.fileno(), mode)
        writer.flush()
        if mtime is not None:
            os.utime(writer.fileno(), (mtime, mtime))


def _remove(directory: int, name: str) -> None:
    """Make room for a file: what stands in its place goes, a directory with everything in it."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=directory)


def _make_room(root: Path, parts: tuple[str, ...]) -> None:
    """Remove what stands in the place of a directory and is none."""
    if not parts:
        return
    parent = _open_directory(root, parts[:-1], create=True)
    try:
        if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(parts[-1], dir_fd=parent)
    except FileNotFoundError:
        return
    finally:
        os.close(parent)


def write_tree(
    root: Path,
    target: str,
    source: Path,
    *,
    mtime: float | None = None,
    skipped: frozenset[str] = frozenset(),
) -> None:
    """Copy a directory's contents into `target`, links as links.

    A link or a file that stands in the place of `target`, or of a directory below it, is replaced: a policy
    cannot keep the tests of its work out.

    Args:
        mtime: time of every file and directory copied, and no bytecode: neither may tell which file of a
            task was written last. None keeps bytecode and stamps nothing.
        skipped: names at the top of `source` that stay behind.
    """
    base = _parts(target)
    stamped: list[tuple[str, ...]] = []
    for directory, names, files in os.walk(source):
        relative = Path(directory).relative_to(source).parts
        if not relative:
            names[:] = [name for name in names if name not in skipped]
            files = [name for name in files if name not in skipped]
        if mtime is not None:
            names[:] = [name for name in names if not name.endswith(_BYTECODE)]
            files = [name for name in files if not name.endswith(_BYTECODE)]
        _make_room(root, (*base, *relative))
        descriptor = _open_directory(root, (*base, *relative), create=True)
        try:
            for name in [*names, *files]:
                _copy_in(descriptor, name, Path(directory, name), mtime)
        finally:
            os.close(descriptor)
        stamped.append((*base, *relative))
    if mtime is not None:
        for parts in stamped:
            descriptor = _open_directory(root, parts, create=False)
            os.utime(descriptor, (mtime, mtime))
            os.close(descriptor)


def _copy_in(directory: int, name: str, source: Path, mtime: float | None) -> None:
    if source.is_symlink():
        _remove(directory, name)
        os.symlink(source.readlink(), name, dir_fd=directory)
    elif source.is_file():
        _write(directory, name, source, mtime)


def read_file(root: Path, source: str, target: Path) -> None:
    """Copy one plain file out of the sandbox.

    Raises:
        FileNotFoundError: there is none.
        TransferError: it is a link or special, or larger than MAX_FILE_BYTES.
    """
    *parents, name = _parts(source)
    directory = _open_directory(root, tuple(parents), create=False)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        size = _copy_out(directory, name, target, MAX_FILE_BYTES)
    except OSError as error:
        raise _explained(error, source) from error
    finally:
        os.close(directory)
    if size is None:
        raise TransferError(
            f"{source} in the sandbox is no plain file, or larger than {MAX_FILE_BYTES} bytes"
        )


def read_tree(root: Path, source: str, target: Path) -> None:
    """Copy a directory's plain files out of the sandbox, within the limits of this module.

    Raises:
        FileNotFoundError: there is no such directory.
        TransferError: the path goes through a link.
    """
    descriptor = _open_directory(root, _parts(source), create=False)
    _read_directory(descriptor, target, 0, _Budget())


@dataclass(slots=True)
class _Budget:
    bytes_left: int = MAX_TREE_BYTES


def _read_directory(descriptor: int, target: Path, depth: int, budget: _Budget) -> None:
    """Copy one directory; closes its descriptor."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in sorted(os.listdir(descriptor)):
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and depth < MAX_DEPTH:
                child = os.open(name, _DIRECTORY_FLAGS, dir_fd=descriptor)
                _read_directory(child, target / name, depth + 1, budget)
            elif stat.S_ISREG(found.st_mode):
                size = _copy_out(descriptor, name, target / name, min(MAX_FILE_BYTES, budget.bytes_left))
                budget.bytes_left -= size or 0
                if size is None:
                    (target / f"{name}.omitted").write_text(f"{found.st_size} bytes: too large to copy out\n")
    finally:
        os.close(descriptor)


def _copy_out(directory: int, name: str, target: Path, limit_bytes: int) -> int | None:
    """Return the number of bytes copied, or None where it is no plain file or too large."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not make us wait
    with open(os.open(name, flags, dir_fd=directory), "rb") as reader:
        found = os.fstat(reader.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit_bytes:
            return None
        data = reader.read(limit_bytes)  # bounded, should the file grow meanwhile
    if target.is_symlink() or target.exists():
        target.unlink()
    target.write_bytes(data)
    target.chmod((found.st_mode & 0o777) | 0o600)
    return len(data)
