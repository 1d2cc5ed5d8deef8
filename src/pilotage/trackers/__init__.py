"""Trackers: a run's records in the tools that people look at, beside `metrics.jsonl`.

Invariant: `metrics.jsonl` is the truth and a tracker a copy of it. When a run is taken up again, its tracker
is brought to what the file then holds, so that a step that is done again is there once, and a tracker that is
new to a run gets its history. A tracker that fails or hangs costs itself, never the run.
"""

from pilotage.trackers.names import TrackerName, check_trackers
from pilotage.trackers.tracker import OnFailure, TrackedRun, Tracker, open_trackers

__all__ = ["OnFailure", "TrackedRun", "Tracker", "TrackerName", "check_trackers", "open_trackers"]
