"""How a run that nobody holds has ended, by its events."""

import os
from pathlib import Path

import pytest

from pilotage.loops import RunDirectory
from pilotage.ops.status import RunState, how_it_ended
from pilotage.ops.view.library import Run
from pilotage.ops.view.library import RunState as ViewedState


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), RunState.DEAD),
        (("started", "checkpoint", "alarm"), RunState.DEAD),
        (("started", "checkpoint", "finished"), RunState.FINISHED),
        (("started", "finished", "tracker_failed"), RunState.FINISHED),
        (("started", "checkpoint", "stopped", "alarm"), RunState.STOPPED),
        (("started", "stopped", "resumed", "rollout_failed"), RunState.DEAD),
        (("started", "driver_crashed", "gave_up"), RunState.GAVE_UP),
    ],
)
def test_the_last_start_or_end_decides(events: tuple[str, ...], expected: RunState) -> None:
    assert how_it_ended([{"event": name} for name in events]) is expected


def test_a_pid_file_that_nobody_holds_makes_no_run_live(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"name": "demo"}, resume=False) as run:
        run.event("started")
        assert Run(run.path).state() is ViewedState.LIVE
    # A killed owner left its file, and its id is another living process's by now: ours.
    run.launcher_path.write_text(f"{os.getpid()}\n")
    assert Run(run.path).state() is ViewedState.STOPPED
