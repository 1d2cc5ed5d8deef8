"""The runs below a directory, read only. A run is found by its name among those listed, never by a path
that a browser sent."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pilotage.errors import ConfigError, RunDirectoryError
from pilotage.loops import LoopSettings, RunDirectory, TrainedGroups
from pilotage.ops import status
from pilotage.ops.report import Record
from pilotage.ops.status import how_it_ended
from pilotage.pid_lock import is_held


class RunState(StrEnum):
    """What a run is doing, as far as its files say."""

    LIVE = "live"
    """Its launcher runs on this machine."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """Neither: killed, failed, or it runs on another machine."""


class Run:
    """One run's files. Reads again only what has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = RunDirectory(path)
        self._metrics_stamp: tuple[int, int] | None = None
        self._metrics: list[Record] = []

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.name

    def config(self) -> Mapping[str, Any]:
        """Return the resolved config; empty where it cannot be read."""
        try:
            return self.directory.config()
        except (OSError, RunDirectoryError):
            return {}

    def section(self, name: str) -> Mapping[str, Any]:
        """Return one section of the config, empty where there is none."""
        found = self.config().get(name)
        return found if isinstance(found, dict) else {}

    def model(self) -> str:
        """Return the model directory of the policy, empty where the config names none."""
        return str(self.section("policy").get("model", ""))

    def settings(self) -> LoopSettings | None:
        """Return the recipe's settings of the loop; None where this version of Pilotage cannot read them."""
        try:
            return LoopSettings.model_validate(self.section("loop"))
        except ValueError:
            return None

    def trained_with(self, group_id: str) -> TrainedGroups | None:
        """Return the groups of the step that trained a group, itself among them; None where none has."""
        steps = self.directory.trained_groups().values()
        return next((trained for trained in steps if group_id in trained.groups), None)

    def metrics(self) -> list[Record]:
        """Return the records that have a step, oldest first."""
        stamp = _stamp(self.directory.metrics_path)
        if stamp != self._metrics_stamp:
            self._metrics = [
                record
                for record in self.directory.metrics()
                if isinstance(record, dict) and isinstance(record.get("step"), int | float)  # pyright: ignore
            ]
            self._metrics_stamp = stamp
        return self._metrics

    def record(self, step: int) -> Record:
        """Return the record of a step, empty where it has none yet."""
        return next((record for record in reversed(self.metrics()) if record["step"] == step), {})

    def events(self) -> list[dict[str, Any]]:
        """Return the events, oldest first; lines that are torn are left out."""
        return [
            event
            for event in self.directory.events()
            if isinstance(event, dict) and isinstance(event.get("event"), str)  # pyright: ignore
        ]

    def state(self) -> RunState:
        """Say what the run is doing."""
        if is_held(self.directory.launcher_path) or is_held(self.directory.lock_path):
            return RunState.LIVE
        is_finished = how_it_ended(self.events()) is status.RunState.FINISHED
        return RunState.FINISHED if is_finished else RunState.STOPPED

    def folders(self) -> list[str]:
        """Return the folders of rollouts, oldest step first, each evaluation after the step it follows."""
        root = self.path / "rollouts"
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        return sorted(names, key=lambda name: (step_of(name), not name.startswith("step")))

    def files(self, folder: str) -> list[Path]:
        """Return the rollout files of one folder, in order of id."""
        return sorted((self.path / "rollouts" / folder).glob("*.json.gz"))

    def revision(self) -> str:
        """Return a word that changes when the run has something new to show."""
        folders = self.folders()
        newest = self.path / "rollouts" / folders[-1] if folders else self.path
        stamps = [_stamp(self.path / name) for name in ("metrics.jsonl", "events.jsonl")]
        return f"{stamps}{len(folders)}{_stamp(newest)}{self.state()}"


def step_of(folder: str) -> int:
    """Return the step that a folder of rollouts is named after; -1 where it is named otherwise."""
    number = folder.rpartition("-")[2]
    return int(number) if number.isdecimal() and number.isascii() else -1


def rollout_id(path: Path) -> str:
    """Return the id of the rollout in a file."""
    return path.name.removesuffix(".json.gz")


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Library:
    """The runs of a directory, or one run where the directory is one."""

    def __init__(self, root: Path) -> None:
        """Raises:
        ConfigError: there is no such directory.
        """
        if not root.is_dir():
            raise ConfigError(f"{root} is no directory; give a directory of runs, or one run")
        self._root = root.resolve()
        self._runs: dict[str, Run] = {}

    @property
    def root(self) -> Path:
        """The directory that was given, absolute."""
        return self._root

    def runs(self) -> list[Run]:
        """Return the runs, the one with the newest activity first."""
        if (self._root / "config.toml").is_file():
            paths = [self._root]
        else:
            paths = [path for path in self._root.iterdir() if (path / "config.toml").is_file()]
        names = {path.name: path for path in paths}
        self._runs = {name: self._runs.get(name) or Run(path) for name, path in names.items()}
        return sorted(self._runs.values(), key=_activity, reverse=True)

    def find(self, name: str) -> Run | None:
        """Return the run of that name; None where there is none."""
        self.runs()
        return self._runs.get(name)


def _activity(run: Run) -> int:
    stamps = [_stamp(run.path / name) for name in ("metrics.jsonl", "events.jsonl", "config.toml")]
    return max(stamp[0] for stamp in stamps if stamp is not None)
