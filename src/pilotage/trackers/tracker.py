"""Trackers that run beside a run: each in a thread of its own, switched off at its first fault."""

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from pilotage.interfaces import MetricSink
from pilotage.trackers.names import TrackerName, check_trackers

_LOG = logging.getLogger(__name__)
CLOSE_S = 30.0
"""A tracker that has not taken its records by then is left behind."""

type Record = Mapping[str, float | int]
type OnFailure = Callable[[TrackerName, str], None]
"""Told once of a tracker that is switched off, and why; from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run when it is opened."""

    name: str
    project: str
    """The recipe's name; runs of one recipe are compared in one project."""
    directory: Path
    """For what the tracker keeps; made when it is needed."""
    config: Mapping[str, Any]
    records: Sequence[Record] = ()
    """What `metrics.jsonl` holds, oldest first. Whatever else the tracker has of this run is to go."""


class Tracker(MetricSink, Protocol):
    """Holds `TrackedRun.records` once it is open, and takes what follows."""

    def close(self) -> None:
        """Finish what was written; nothing is written after."""
        ...


@dataclass(slots=True)
class TrackerThread:
    """Writes to one tracker in a daemon thread: a server that does not answer must not stop the loop.

    The loop puts, the thread takes, one record a step, so the queue is as long as a tracker is behind.
    """

    name: TrackerName
    tracker: Tracker
    on_failure: OnFailure
    close_s: float = CLOSE_S
    queue: SimpleQueue[Record | None] = field(default_factory=SimpleQueue[Record | None])
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while (record := self.queue.get()) is not None:
                self.tracker.write(record)
            self.tracker.close()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a tracker raises, the run goes on
            self.on_failure(self.name, f"{type(error).__name__}: {error}")

    def write(self, record: Record) -> None:
        """See `MetricSink`: returns at once; a tracker that is switched off takes nothing."""
        if self.thread.is_alive():
            self.queue.put(dict(record))

    def close(self) -> None:
        """Wait until everything is written, for a bounded time."""
        self.queue.put(None)
        self.thread.join(self.close_s)
        if self.thread.is_alive():
            self.on_failure(self.name, f"it did not finish in {self.close_s:.0f} s")


@contextlib.contextmanager
def open_trackers(
    names: Iterable[TrackerName], run: TrackedRun, on_failure: OnFailure
) -> Generator[list[MetricSink]]:
    """Open trackers for a run, and finish them when the context ends; `console` is none of ours.

    Raises:
        ConfigError: a library is missing. Any other fault switches a tracker off.
    """
    wanted = [name for name in dict.fromkeys(names) if name is not TrackerName.CONSOLE]
    check_trackers(wanted)

    def warn(name: TrackerName, message: str) -> None:
        _LOG.warning("tracker %s is switched off, and the run goes on: %s", name, message)
        on_failure(name, message)

    workers: list[TrackerThread] = []
    for name in wanted:
        try:
            tracker = importlib.import_module(f"pilotage.trackers.{name}_tracker").open_tracker(run)
        except Exception as error:  # noqa: BLE001 - as above
            warn(name, f"{type(error).__name__}: {error}")
        else:
            workers.append(TrackerThread(name, tracker, warn))
    try:
        yield list(workers)
    finally:
        for worker in workers:
            worker.close()
