"""A Harbor task directory, as the loop knows it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One Harbor task directory."""

    id: str
    """Unique over the run: dataset and directory name."""
    path: Path
    """Absolute directory that holds instruction.md, environment/ and tests/test.sh."""
