"""Weights & Biases: offline in the run directory unless WANDB_API_KEY or WANDB_MODE says otherwise.

A resumed run keeps its id. Offline its file is written anew, to be sent with `wandb sync`. Online, steps that
the server has stay as they are, which is its own rule, and later ones follow.
"""

import os
import secrets
import shutil
from collections.abc import Mapping

import wandb

from pilotage.files import write_atomically
from pilotage.trackers.tracker import TrackedRun


class WandbTracker:
    """A `Tracker`; send it with `wandb sync RUN/trackers/wandb/offline-run-*`."""

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        run.directory.mkdir(parents=True, exist_ok=True)
        id_file = run.directory / "wandb_run"
        if not id_file.is_file():
            write_atomically(id_file, f"{secrets.token_hex(4)}\n".encode())
        if mode == "offline":
            shutil.rmtree(run.directory / "wandb", ignore_errors=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=id_file.read_text().strip(),
            dir=str(run.directory),
            config=dict(run.config),
            resume="allow",
            mode="online" if mode == "online" else "offline" if mode == "offline" else "disabled",
            settings=wandb.Settings(
                console="off",  # the terminal and its output are the run's own
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._first_step = self._run.step
        for record in run.records:
            self.write(record)

    def write(self, record: Mapping[str, float | int]) -> None:
        """See `MetricSink`."""
        step = int(record["step"])
        if step >= self._first_step:
            metrics = {name: value for name, value in record.items() if name != "step"}
            self._run.log(metrics, step=step, commit=True)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def open_tracker(run: TrackedRun) -> WandbTracker:
    """Open it."""
    return WandbTracker(run)
