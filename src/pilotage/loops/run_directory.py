"""A run on disk. Killed at any instruction, it can be resumed from its newest whole checkpoint.

config.toml  launcher.pid  lock  events.jsonl  metrics.jsonl  reward_graph.svg
rollouts/step-0001/ID.json.gz  errors/ID.error  checkpoints/step-0010/
"""

import fcntl
import hashlib
import os
import shutil
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import tomli_w

from pilotage.errors import RunDirectoryError
from pilotage.files import append_line, write_atomically
from pilotage.loops.rollout_files import write_rollout
from pilotage.types import Rollout

FREE_KEYS = frozenset({"logger"})
"""May differ when a run is resumed: they decide who watches, not what is learnt."""


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of what decides a run, from its resolved config in any order of its keys."""
    deciding = {key: value for key, value in config.items() if key not in FREE_KEYS}
    return hashlib.sha256(orjson.dumps(deciding, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    old, new = _flat(saved), _flat(given)
    keys = sorted((old.keys() | new.keys()) - FREE_KEYS)
    keys = [key for key in keys if old.get(key) != new.get(key)]
    return ", ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys)


class RunDirectory:
    """One run's files. Use it as a context manager: it holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], *, resume: bool) -> Self:
        """Create the run, or take it up again.

        Raises:
            RunDirectoryError: it exists and `resume` is off; it does not and `resume` is on; its config
                differs (the message lists the keys); another process holds it.
        """
        run = cls(path)
        if resume and not run.config_path.is_file():
            raise RunDirectoryError(f"{path} holds no run to resume; leave out --resume to start one")
        # A run that never got as far as its first event left nothing worth keeping.
        if not resume and run.config_path.is_file() and (path / "events.jsonl").is_file():
            raise RunDirectoryError(
                f"{path} holds a run already; give --resume to go on with it, or another run name"
            )
        if resume:
            saved = run.config()
            if config_digest(saved) != config_digest(config):
                raise RunDirectoryError(
                    f"{path} was started with another config: {_differences(saved, config)}"
                )
        run._acquire()
        if not resume:
            write_atomically(run.config_path, tomli_w.dumps(dict(config)).encode())
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            (self.path / "launcher.pid").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        for name in ("rollouts", "errors", "checkpoints"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            pid = self.path / "launcher.pid"
            owner = pid.read_text().strip() if pid.is_file() else "unknown"
            raise RunDirectoryError(f"{self.path} is in use by process {owner}") from None
        self._lock = lock
        write_atomically(self.path / "launcher.pid", f"{os.getpid()}\n".encode())

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.toml"

    def config(self) -> dict[str, Any]:
        """Return the resolved config that the run was started with."""
        return tomllib.loads(self.config_path.read_text(encoding="utf-8"))

    # --- records ---

    def event(self, name: str, **facts: str | float | None) -> None:
        """Append something that a person would act on."""
        record = {"at": time.time(), "event": name, **facts}
        append_line(self.path / "events.jsonl", orjson.dumps(record))

    def write(self, record: Mapping[str, float | int]) -> None:
        """Append one step's record; see `MetricSink`."""
        append_line(self.path / "metrics.jsonl", orjson.dumps(dict(record)))

    def metrics(self) -> list[dict[str, float]]:
        """Return the records, oldest first, one a step; a torn last line is left out."""
        path = self.path / "metrics.jsonl"
        records: list[dict[str, float]] = []
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            try:
                records.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue
        return records

    def kept_metrics(self) -> list[dict[str, float]]:
        """Return the records that a resume keeps: those that the newest checkpoint has behind it."""
        newest = self.newest_checkpoint()
        return [] if newest is None else [record for record in self.metrics() if record["step"] <= newest]

    def add_rollout(self, folder: str, rollout: Rollout) -> None:
        """Write a rollout to `rollouts/FOLDER/`, and its `.error` file where it failed."""
        directory = self.path / "rollouts" / folder
        directory.mkdir(parents=True, exist_ok=True)
        write_rollout(directory / f"{rollout.id}.json.gz", rollout)
        if rollout.failure is not None:
            failure = rollout.failure
            text = (
                f"outcome: {rollout.outcome}\nrollout: {rollout.id}\ntask: {rollout.task_id}\n"
                f"where: {failure.where}\nmessage: {failure.message}\nwhat to do: {failure.advice}\n"
            )
            if failure.traceback:
                text += f"\n{failure.traceback}"
            write_atomically(self.path / "errors" / f"{rollout.id}.error", text.encode())

    def rollout_files(self) -> list[Path]:
        """Return every rollout file, in order of step and id."""
        return sorted((self.path / "rollouts").glob("*/*.json.gz"))

    # --- checkpoints ---

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or will be."""
        return self.path / "checkpoints" / f"step-{step:04d}"

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest whole checkpoint; a trainer renames one into place last."""
        steps = [int(path.name.removeprefix("step-")) for path in (self.path / "checkpoints").glob("step-*")]
        return max(steps, default=None)

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: it was not checkpointed and will be done again."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        write_atomically(self.path / "metrics.jsonl", b"".join(orjson.dumps(r) + b"\n" for r in kept))
        for directory in (self.path / "rollouts").glob("*-[0-9]*"):
            if int(directory.name.rpartition("-")[2]) > step:
                shutil.rmtree(directory)
        for error in (self.path / "errors").glob("*.error"):
            if int(error.name.split("-")[1]) > step:
                error.unlink()
