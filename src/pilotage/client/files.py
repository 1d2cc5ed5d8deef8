"""Files that are there whole or not at all, and readable by whom they should be."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str, *, mode: int = 0o644) -> None:
    """Write a temporary file that is born with `mode`, flush it to disk, and rename it into place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
