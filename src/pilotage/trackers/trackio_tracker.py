"""Trackio: its SQLite file in the run directory, or where TRACKIO_DIR says.

A run that is resumed has its rows written anew under its name. With TRACKIO_SPACE_ID or TRACKIO_SERVER_URL
the rows go to that server; they cannot be taken back there, so a step that is done again is there twice.
"""

import contextlib
import io
import os
from collections.abc import Mapping

from pilotage.files import write_atomically
from pilotage.trackers.tracker import TrackedRun

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker:
    """A `Tracker`; look at it with `TRACKIO_DIR=RUN/trackers/trackio trackio show`."""

    def __init__(self, run: TrackedRun) -> None:
        # Read once, when the library is imported.
        os.environ.setdefault("TRACKIO_DIR", str(run.directory / "trackio"))
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        is_remote = any(os.environ.get(name) for name in _REMOTE)
        id_file = run.directory / "trackio_run"
        run_id = id_file.read_text().strip() if id_file.is_file() else None
        if run_id is not None and not is_remote:
            SQLiteStorage.delete_run(run.project, run.name, run_id=run_id)
        with contextlib.redirect_stdout(io.StringIO()):  # it greets; the terminal is the progress bar's
            self._run = trackio.init(
                project=run.project,
                name=run.name,
                config=dict(run.config),
                resume="allow" if is_remote else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        run.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(id_file, f"{self._run.id}\n".encode())
        if run_id is None or not is_remote:
            for record in run.records:
                self.write(record)

    def write(self, record: Mapping[str, float | int]) -> None:
        """See `MetricSink`."""
        metrics = {name: value for name, value in record.items() if name != "step"}
        self._run.log(metrics, step=int(record["step"]))

    def close(self) -> None:
        """See `Tracker`."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


def open_tracker(run: TrackedRun) -> TrackioTracker:
    """Open it."""
    return TrackioTracker(run)
