"""A job's log on disk, read in pages by byte offset, so that a reader never misses a line."""

from pathlib import Path
from typing import Any

import orjson

_MAX_LINES = 1000
_PAGE_BYTES = 2**20
_TAIL_BYTES = 2**16


def read_page(path: Path, *, cursor: int, max_lines: int, has_ended: bool) -> dict[str, Any]:
    """Return whole lines from an offset on: `entries`, `next_cursor`, and `eof` where they reach the end.

    The log of a running job goes on after its `eof`.
    """
    try:
        with path.open("rb") as file:
            file.seek(cursor)
            content = file.read(_PAGE_BYTES)
    except FileNotFoundError:
        return {"entries": [], "next_cursor": str(cursor), "eof": True}
    whole = content if has_ended and len(content) < _PAGE_BYTES else content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines(keepends=True)[: min(max_lines, _MAX_LINES)]
    offset = cursor + sum(map(len, lines))
    is_end = offset == cursor + len(whole) and len(content) < _PAGE_BYTES
    entries = [_entry(line.decode("utf-8", "replace").rstrip("\n")) for line in lines]
    return {"entries": entries, "next_cursor": str(offset), "eof": is_end}


def tail(path: Path, num_lines: int) -> tuple[str, ...]:
    """Return the last lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return ()
    return tuple(content.decode("utf-8", "replace").splitlines()[-num_lines:])


def _entry(line: str) -> dict[str, Any]:
    """Return a line as the viewer knows it: its fields where it is a JSON object, else the raw text."""
    if line.startswith("{"):
        try:
            fields = orjson.loads(line)  # what it reads can be written again
        except ValueError:
            fields = None
        if isinstance(fields, dict) and "msg" in fields:
            return fields
    level, _, message = line.partition(" ")
    if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        logger, _, text = message.partition(": ")
        return {"level": level, "logger": logger, "msg": text}
    return {"_raw": line[:8192], "_truncated": len(line) > 8192}
