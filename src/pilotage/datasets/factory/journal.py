"""Remember what the tests said, so that a killed run goes on and comes to the same result.

Everything else that the factory does follows from its arguments and these verdicts. Invariant: a verdict is
kept under a digest of all that it depends on, so an old one is never read for another bug.
"""

import contextlib
import hashlib
import threading
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import orjson

from pilotage.datasets.factory.proof import Suite, Verdict
from pilotage.datasets.factory.suites import Failure
from pilotage.files import append_line, write_atomically


def digest(*parts: object) -> str:
    """Return a digest of plain values."""
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:32]


class Journal:
    """The verdicts on one package, in `DIRECTORY/LABEL.jsonl`; safe to use from several threads."""

    def __init__(self, directory: Path, label: str) -> None:
        self._path = directory / f"{label}.jsonl"
        self._suite = directory / f"{label}.suite"
        self._lock = threading.Lock()  # one line at a time
        self._verdicts: dict[str, Verdict] = {}
        if self._path.is_file():
            if not self._path.read_bytes().endswith(b"\n"):
                append_line(self._path, b"")  # ends what a kill has torn
            for line in self._path.read_bytes().split(b"\n"):
                with contextlib.suppress(orjson.JSONDecodeError):
                    self._read(orjson.loads(line))

    def _read(self, record: Mapping[str, object]) -> None:
        key, verdict = record["key"], record["verdict"]
        assert isinstance(key, str)
        assert isinstance(verdict, dict)
        failures = {name: Failure(**failure) for name, failure in verdict.pop("fail_to_pass").items()}
        passed = tuple(verdict.pop("pass_to_pass"))
        self._verdicts[key] = Verdict(fail_to_pass=failures, pass_to_pass=passed, **verdict)

    def verdict(self, key: str) -> Verdict | None:
        """Return what is known."""
        return self._verdicts.get(key)

    def keep(self, key: str, verdict: Verdict) -> None:
        """Remember a verdict on disk."""
        with self._lock:
            self._verdicts[key] = verdict
            append_line(self._path, orjson.dumps({"key": key, "verdict": asdict(verdict)}))

    def suite(self, key: str) -> Suite | None:
        """Return the suite that was kept under `key`."""
        if not self._suite.is_file():
            return None
        record = orjson.loads(zlib.decompress(self._suite.read_bytes()))
        if record["key"] != key:
            return None
        stable: list[str] = record["stable"]
        lines = {
            path: {int(line): tuple(stable[index] for index in indices) for line, indices in by_line.items()}
            for path, by_line in record["lines"].items()
        }
        return Suite(stable=tuple(stable), lines=lines, breadth=record["breadth"])

    def keep_suite(self, key: str, suite: Suite) -> None:
        """Remember a suite on disk."""
        place = {name: index for index, name in enumerate(suite.stable)}
        lines = {
            path: {str(line): [place[name] for name in names] for line, names in by_line.items()}
            for path, by_line in suite.lines.items()
        }
        record = {"key": key, "stable": suite.stable, "lines": lines, "breadth": suite.breadth}
        write_atomically(self._suite, zlib.compress(orjson.dumps(record)))
