"""Write files of which a reader, or the next start, never sees a part.

Invariant: at any instant, that of a kill included, a path holds its old content or its new one. A path has
one writer at a time; the callers see to that.
"""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write `content` to a temporary file beside `path`, flush it to disk, and rename it into place.

    Args:
        path: the temporary file is `.NAME.partial`; one that a killed writer left is replaced.
        content: everything that the file shall hold.
        mode: permissions that the file is born with, less the umask; those of a file that it replaces go.

    Raises:
        OSError: the file cannot be written; `path` is as it was, and no temporary file is left.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # Exclusive, so that a secret never enters a file or a link that somebody else made in between.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append one line and flush it to disk.

    What a killed writer or a full disk left torn is closed first: the reader drops that
    line, and not this one with it.
    """
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
