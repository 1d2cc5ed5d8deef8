"""A run on disk. Killed at any instruction, it can be resumed from its newest whole checkpoint.

config.toml  launcher.pid  lock  events.jsonl  metrics.jsonl  groups.jsonl  reward_graph.svg
rollouts/step-0001/ID.json.gz, summaries.jsonl  errors/ID.error  checkpoints/step-0010/, step-0010.json
trainer_logprobs/step-0001.safetensors
"""

import contextlib
import hashlib
import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson
import tomli_w

from pilotage.algorithms import split_trained
from pilotage.errors import RunDirectoryError, WireError
from pilotage.files import append_line, write_atomically
from pilotage.loops.rollout_files import read_rollout, write_rollout
from pilotage.loops.schedule import Position
from pilotage.loops.summaries import append_summary, complete_summaries
from pilotage.pid_lock import PidLock, acquire, holder
from pilotage.types import Logprobs, Rollout, RolloutRequest, Sample
from pilotage.wire.blob import read_arrays, read_header, write_blob

FREE_KEYS = frozenset({"logger", "metrics_port"})
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


def _objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file of lines; a torn last line is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroups:
    """Which groups of rollouts made the batch of a step."""

    step: int
    trainer_version: int
    """weights_version of the trainer when it computed the gradient."""
    groups: Sequence[str]
    """Their ids, those of groups set aside included."""


class RunDirectory:
    """One run's files. Use it as a context manager: it holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: list[PidLock] = []

    @classmethod
    def check(cls, path: Path, config: Mapping[str, Any], *, resume: bool) -> None:
        """Refuse what `open` would, but for the lock; nothing is written.

        Raises:
            RunDirectoryError: it exists and `resume` is off; it does not and `resume` is on; its config
                differs (the message lists the keys).
        """
        run = cls(path)
        if resume and not run.config_path.is_file():
            raise RunDirectoryError(f"{path} holds no run to resume; leave out --resume to start one")
        # A run that never got as far as its first event left nothing worth keeping.
        if not resume and run.config_path.is_file() and run.events_path.is_file():
            raise RunDirectoryError(
                f"{path} holds a run already; give --resume to go on with it, or another run name"
            )
        if resume:
            saved = run.config()
            if config_digest(saved) != config_digest(config):
                raise RunDirectoryError(
                    f"{path} was started with another config: {_differences(saved, config)}"
                )

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], *, resume: bool) -> Self:
        """Create the run, or take it up again.

        Raises:
            RunDirectoryError: as of `check`, or another process holds it.
        """
        cls.check(path, config, resume=resume)
        run = cls(path)
        with contextlib.ExitStack() as held:
            held.push(run)
            run._acquire()
            if not resume:
                write_atomically(run.config_path, tomli_w.dumps(dict(config)).encode())
            held.pop_all()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._locks:
            self._locks.pop().release()

    def _acquire(self) -> None:
        for name in ("rollouts", "errors", "checkpoints"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        lock = acquire(self.lock_path)
        if lock is None:
            raise RunDirectoryError(f"{self.path} is in use by process {holder(self.lock_path) or 'unknown'}")
        self._locks.append(lock)
        # Whoever launched this process holds it already; without a launcher, this process is its own.
        launcher = acquire(self.launcher_path)
        if launcher is not None:
            self._locks.append(launcher)

    @property
    def lock_path(self) -> Path:
        """Locked by the driver while it works on the run; see `pilotage.pid_lock`."""
        return self.path / "lock"

    @property
    def launcher_path(self) -> Path:
        """Locked by what a signal to stop the run goes to: its launcher, or the driver itself."""
        return self.path / "launcher.pid"

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        """One record a step, a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """What a person would act on, a JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def groups_path(self) -> Path:
        """What each step trained, and what a curriculum chose; a JSON object a line."""
        return self.path / "groups.jsonl"

    def config(self) -> dict[str, Any]:
        """Return the resolved config that the run was started with.

        Raises:
            RunDirectoryError: it is damaged.
        """
        try:
            return tomllib.loads(self.config_path.read_text(encoding="utf-8"))
        except ValueError as error:  # no UTF-8, or no TOML
            raise RunDirectoryError(f"{self.config_path} cannot be read: {error}; restore it") from error

    # --- records ---

    def event(self, name: str, **facts: str | float | None) -> None:
        """Append something that a person would act on."""
        record = {"at": time.time(), "event": name, **facts}
        append_line(self.events_path, orjson.dumps(record))

    def write(self, record: Mapping[str, float | int]) -> None:
        """Append one step's record; see `MetricSink`."""
        append_line(self.metrics_path, orjson.dumps(dict(record)))

    def metrics(self) -> list[dict[str, float]]:
        """Return the records, oldest first, one a step; a torn last line is left out."""
        return _objects(self.metrics_path)

    def events(self) -> list[dict[str, Any]]:
        """Return what `event` wrote, oldest first."""
        return _objects(self.events_path)

    def kept_metrics(self) -> list[dict[str, float]]:
        """Return the records that a resume keeps: those that the newest checkpoint has behind it."""
        newest = self.newest_checkpoint()
        return [] if newest is None else [record for record in self.metrics() if record["step"] <= newest]

    def write_group(self, number: int, task_id: str, pass_rate: float | None = None) -> None:
        """Append which task a group works on, or its pass rate; see `loops.curriculum`."""
        record = {"group": number, "task": task_id} | ({} if pass_rate is None else {"pass_rate": pass_rate})
        append_line(self.groups_path, orjson.dumps(record))

    def group_records(self) -> list[dict[str, Any]]:
        """Return what `write_group` wrote, oldest first."""
        return [record for record in _objects(self.groups_path) if "group" in record]

    def write_trained(self, trained: TrainedGroups) -> None:
        """Append what a step trains, before its record is written."""
        append_line(self.groups_path, orjson.dumps(asdict(trained)))

    def trained_groups(self) -> dict[int, TrainedGroups]:
        """Return by step what `write_trained` wrote; of a step that was done again, the last."""
        records = [record for record in _objects(self.groups_path) if "step" in record]
        return {record["step"]: TrainedGroups(**record) for record in records}

    def write_trainer_logprobs(self, step: int, samples: Sequence[Sample], values_n: Logprobs) -> None:
        """Write what the trainer gave to the tokens that a step trains, before its update.

        Args:
            values_n: [n] of the trained tokens, sample after sample.
        """
        parts_of: dict[str, list[Logprobs]] = {}
        for sample, values in zip(samples, split_trained(samples, values_n), strict=True):
            parts_of.setdefault(sample.sequence_id, []).append(values)
        path = self._trainer_logprobs_path(step)
        path.parent.mkdir(exist_ok=True)
        joined = {name: np.concatenate(parts) for name, parts in parts_of.items()}
        write_atomically(path, write_blob(joined, {}))

    def trainer_logprobs(self, step: int, rollout_id: str) -> Logprobs | None:
        """Return [n] what the trainer gave to a rollout's trained tokens, in the order of its samples.

        None where the step did not train it, where the service does not say, or where the file is damaged.
        """
        try:
            content = self._trainer_logprobs_path(step).read_bytes()
            found = read_arrays(content, read_header(content)).get(rollout_id)
        except (OSError, WireError):
            return None
        return found if found is not None and found.dtype == np.float32 and found.ndim == 1 else None

    def _trainer_logprobs_path(self, step: int) -> Path:
        return self.path / "trainer_logprobs" / f"step-{step:04d}.safetensors"

    def add_rollout(self, folder: str, rollout: Rollout) -> None:
        """Write a rollout to `rollouts/FOLDER/` and its line there, and its `.error` file where it failed."""
        directory = self.path / "rollouts" / folder
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{rollout.id}.json.gz"
        write_rollout(path, rollout)
        append_summary(path, rollout)
        error_path = self.path / "errors" / f"{rollout.id}.error"
        if rollout.failure is None:
            error_path.unlink(missing_ok=True)  # of an earlier try
        else:
            failure = rollout.failure
            text = (
                f"outcome: {rollout.outcome}\nrollout: {rollout.id}\ntask: {rollout.task_id}\n"
                f"where: {failure.where}\nmessage: {failure.message}\nwhat to do: {failure.advice}\n"
            )
            if failure.traceback:
                text += f"\n{failure.traceback}"
            write_atomically(error_path, text.encode())

    def kept_rollout(self, folder: str, request: RolloutRequest) -> Rollout | None:
        """Return the rollout that an earlier process has left of a request; None where it must be run.

        One without a reward is run again: what it failed from may be over.
        """
        path = self.path / "rollouts" / folder / f"{request.id}.json.gz"
        try:
            rollout = read_rollout(path)
        except FileNotFoundError:
            return None
        except RunDirectoryError as error:
            self.event("rollout_unreadable", rollout=request.id, message=f"{error}; it is run again")
            return None
        return rollout if rollout.reward is not None and rollout.task_id == request.task.id else None

    def rollout_files(self) -> list[Path]:
        """Return every rollout file, in order of step and id."""
        return sorted((self.path / "rollouts").glob("*/*.json.gz"))

    def files_of_group(self, group_id: str) -> list[Path]:
        """Return the rollout files of a group to train on, in order of id."""
        folder = group_id.rpartition("-")[0]
        return sorted((self.path / "rollouts" / folder).glob(f"{group_id}-*.json.gz"))

    # --- checkpoints ---

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or will be."""
        return self.path / "checkpoints" / f"step-{step:04d}"

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest whole checkpoint; a trainer renames one into place last."""
        found = (self.path / "checkpoints").glob("step-*")
        steps = [int(path.name.removeprefix("step-")) for path in found if path.is_dir()]
        return max(steps, default=None)

    def write_position(self, position: Position) -> None:
        """Say where the run stands after a step, before that step's checkpoint is made."""
        record = {"next_group": position.next_group, "ahead": sorted(position.ahead)}
        path = self.checkpoint(position.steps_done).with_suffix(".json")
        write_atomically(path, orjson.dumps(record) + b"\n")

    def position(self, step: int) -> Position:
        """Return where the run stood at the checkpoint of `step`.

        Raises:
            RunDirectoryError: its file is gone or damaged.
        """
        path = self.checkpoint(step).with_suffix(".json")
        try:
            record = orjson.loads(path.read_bytes())
            return Position(
                steps_done=step, next_group=int(record["next_group"]), ahead=frozenset(record["ahead"])
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            fix = f"restore it, or remove {path.with_suffix('')}"
            raise RunDirectoryError(f"{path} does not say where the run stood: {error}; {fix}") from error

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: it was not checkpointed and will be done again.

        Rollouts to train on are kept: they are what they are, whichever process runs the step.
        """
        kept = [record for record in self.metrics() if record["step"] <= step]
        lost = sorted(set(range(step + 1)) - {int(record["step"]) for record in kept})
        if lost:
            self.event("records_lost", count=len(lost), steps=", ".join(map(str, lost)))
        write_atomically(self.metrics_path, b"".join(orjson.dumps(r) + b"\n" for r in kept))
        for path in (self.path / "trainer_logprobs").glob("step-*.safetensors"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        for directory in (self.path / "rollouts").glob("eval-[0-9]*"):
            if int(directory.name.rpartition("-")[2]) > step:
                shutil.rmtree(directory)
        for error in (self.path / "errors").glob("eval-*.error"):
            if int(error.name.split("-")[1]) > step:
                error.unlink()
        for directory in (self.path / "rollouts").glob("*-[0-9]*/"):
            complete_summaries(directory)
        # A killed writer's; nothing else replaces it.
        for partial in [
            *(self.path / "errors").glob(".*.partial"),
            *(self.path / "rollouts").glob("*/.*.partial"),
            *(self.path / "trainer_logprobs").glob(".*.partial"),
        ]:
            partial.unlink()
