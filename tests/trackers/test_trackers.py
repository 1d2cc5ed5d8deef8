"""A tracker holds what `metrics.jsonl` holds, after a crash and a resume too, and never takes a run down."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.loops.rig import CountingTrainer, Rig
from tests.trackers.readers import History, read_mlflow, read_tensorboard, read_trackio, read_wandb

from pilotage.errors import TrainerError
from pilotage.loops import EvaluationSettings, LoopSettings, RunDirectory
from pilotage.trackers import TrackerName, open_trackers
from pilotage.trackers.names import LIBRARIES
from pilotage.trackers.tracker import TrackedRun, TrackerThread

SETTINGS = LoopSettings(
    num_steps=5,
    tasks_per_step=2,
    group_size=2,
    checkpoint_every_steps=2,
    evaluation=EvaluationSettings(every_steps=3),
)


def needs(name: TrackerName) -> pytest.MarkDecorator:
    missing = [library for library in LIBRARIES[name] if importlib.util.find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed, see the extra `{name}`")


READERS = [
    pytest.param(name, reader, marks=needs(name), id=name)
    for name, reader in (
        (TrackerName.TENSORBOARD, read_tensorboard),
        (TrackerName.TRACKIO, read_trackio),
        (TrackerName.WANDB, read_wandb),
        (TrackerName.MLFLOW, read_mlflow),
    )
]


def on_disk(path: Path, name: TrackerName) -> History:
    """What a tracker should hold; TensorBoard has single precision."""
    exact = name is not TrackerName.TENSORBOARD
    return {
        int(record["step"]): {
            key: value if exact else float(np.float32(value))
            for key, value in record.items()
            if key != "step"
        }
        for record in RunDirectory(path).metrics()
    }


@pytest.mark.parametrize(("name", "read"), READERS)
async def test_a_run_that_failed_and_was_resumed_is_there_once_and_exactly(
    name: TrackerName, read: Callable[[Path], History], tmp_path: Path
) -> None:
    path = tmp_path / f"run-{name}"
    with pytest.raises(TrainerError):
        await Rig(settings=SETTINGS, trainer=CountingTrainer(fails_in_step=4)).run(path, loggers=[name])
    assert read(path) == on_disk(path, name)
    assert sorted(on_disk(path, name)) == [0, 1, 2, 3]
    id_file = path / "trackers" / "wandb_run"
    before = id_file.read_text() if name is TrackerName.WANDB else ""

    # Step 3 had no checkpoint and is done again.
    assert await Rig(settings=SETTINGS).run(path, resume=True, loggers=[name]) == []
    assert sorted(on_disk(path, name)) == [0, 1, 2, 3, 4, 5]
    assert read(path) == on_disk(path, name)
    assert (id_file.read_text() if name is TrackerName.WANDB else "") == before


@pytest.mark.parametrize(("name", "read"), READERS)
async def test_a_tracker_that_is_added_on_a_resume_gets_the_history(
    name: TrackerName, read: Callable[[Path], History], tmp_path: Path
) -> None:
    path = tmp_path / f"late-{name}"
    with pytest.raises(TrainerError):
        await Rig(settings=SETTINGS, trainer=CountingTrainer(fails_in_step=5)).run(path)
    assert await Rig(settings=SETTINGS).run(path, resume=True, loggers=[name]) == []
    assert read(path) == on_disk(path, name)


@needs(TrackerName.MLFLOW)
async def test_mlflow_goes_on_with_its_run_where_no_step_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(TrainerError):  # the last record is that of the checkpoint
        await Rig(settings=SETTINGS, trainer=CountingTrainer(fails_in_step=3)).run(
            path, loggers=[TrackerName.MLFLOW]
        )
    before = (path / "trackers" / "mlflow_run").read_text()
    await Rig(settings=SETTINGS).run(path, resume=True, loggers=[TrackerName.MLFLOW])
    assert (path / "trackers" / "mlflow_run").read_text() == before
    assert read_mlflow(path) == on_disk(path, TrackerName.MLFLOW)


@needs(TrackerName.TENSORBOARD)
async def test_a_tracker_that_cannot_be_opened_is_switched_off_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "trackers").write_text("a file where the directory should be")
    failures = await Rig(settings=SETTINGS).run(path, loggers=[TrackerName.TENSORBOARD])
    assert [name for name, _ in failures] == ["tensorboard"]
    assert len(RunDirectory(path).metrics()) == 6


@dataclass(slots=True)
class Breaking:
    """A tracker that takes one record, then raises, or waits for ever."""

    hangs: bool = False
    taken: list[float] = field(default_factory=list[float])

    def write(self, record: Mapping[str, float | int]) -> None:
        if self.taken:
            if self.hangs:
                threading.Event().wait()
            raise ConnectionError("the server went away")
        self.taken.append(record["step"])

    def close(self) -> None:
        raise AssertionError("a tracker that is switched off is left alone")


@pytest.mark.parametrize(
    ("hangs", "message"),
    [(False, "ConnectionError: the server went away"), (True, "it did not finish in 0 s")],
)
def test_a_tracker_that_breaks_is_told_of_once(hangs: bool, message: str) -> None:
    failures: list[tuple[str, str]] = []
    tracker = Breaking(hangs=hangs)
    thread = TrackerThread(
        TrackerName.WANDB, tracker, lambda name, text: failures.append((name, text)), close_s=0.2
    )
    for step in range(4):
        thread.write({"step": step})
    thread.close()
    thread.write({"step": 9})
    assert failures == [("wandb", message)]
    assert tracker.taken == [0]


def test_a_missing_library_is_an_error_that_names_its_extra() -> None:
    program = """
import sys
from pilotage.errors import ConfigError
from pilotage.trackers.names import LIBRARIES, TrackerName, check_trackers
for libraries in LIBRARIES.values():
    sys.modules.update(dict.fromkeys(libraries))  # as if none were installed
check_trackers([TrackerName.CONSOLE])
for name in list(TrackerName)[1:]:
    try:
        check_trackers([TrackerName.CONSOLE, name])
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"logger has {name}, and {LIBRARIES[name][0]} is not installed; `pip install 'pilotage[{name}]'`"
        for name in list(TrackerName)[1:]
    ]


def test_the_console_alone_opens_nothing(tmp_path: Path) -> None:
    run = TrackedRun(name="r", project="p", directory=tmp_path / "trackers", config={})
    with open_trackers([TrackerName.CONSOLE], run, lambda name, message: None) as sinks:
        assert sinks == []
    assert list(tmp_path.iterdir()) == []
