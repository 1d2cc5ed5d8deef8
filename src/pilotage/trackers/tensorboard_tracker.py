"""TensorBoard: event files in the run directory, written anew when a run is resumed.

TensorBoard keeps scalars in single precision.
"""

import shutil
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pilotage.trackers.tracker import TrackedRun


class TensorBoardTracker:
    """A `Tracker`; look at it with `tensorboard --logdir RUN/trackers/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        directory = run.directory / "tensorboard"
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = EventFileWriter(str(directory))
        for record in run.records:
            self.write(record)

    def write(self, record: Mapping[str, float | int]) -> None:
        """See `MetricSink`."""
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in record.items() if tag != "step"
        ]
        event = Event(wall_time=time.time(), step=int(record["step"]), summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


def open_tracker(run: TrackedRun) -> TensorBoardTracker:
    """Open it."""
    return TensorBoardTracker(run)
