"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file beside `path`, flush it to disk, and rename it into place."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def append_line(path: Path, line: bytes) -> None:
    """Append one line and flush it to disk; a torn last line of a killed writer is dropped by the reader."""
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
