"""Watch a run that is going on: its alarms, each told once until it has passed."""

import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import httpx

from pilotage.loops.run_directory import RunDirectory
from pilotage.ops.alarms import Alarm, AlarmName, Surroundings, find_alarms

_log = logging.getLogger(__name__)

WEBHOOK_VARIABLE = "PILOTAGE_ALARM_WEBHOOK"
"""URL that gets each new alarm; in the environment, because such a URL is often a secret."""
_WEBHOOK_TIMEOUT_S = 10.0
_PTY = Path("/proc/sys/kernel/pty")


def surroundings(run: RunDirectory) -> Surroundings:
    """Ask the machine what the run's records do not say."""
    newest = max((path.stat().st_mtime for path in _record_files(run)), default=time.time())
    disk = shutil.disk_usage(run.path)
    ptys = [int((_PTY / name).read_text()) for name in ("nr", "max")] if _PTY.is_dir() else [0, 1]
    return Surroundings(
        seconds_since_record=max(0.0, time.time() - newest),
        free_disk_share=disk.free / disk.total,
        used_pty_share=ptys[0] / ptys[1],
    )


class AlarmWatch:
    """Looks again and again; an alarm that has passed may come back and is then told again."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._ringing: set[AlarmName] = set()
        self._stamps: list[int] = []
        self._quiet_from = 0.0
        """When, by the monotonic clock, the newest record was written."""

    def look(self) -> list[Alarm]:
        """Return the alarms that are new since the last look, and append each to the run's events."""
        found = find_alarms(self._run.metrics(), self._surroundings())
        new = [alarm for alarm in found if alarm.name not in self._ringing]
        self._ringing = {alarm.name for alarm in found}
        for alarm in new:
            self._run.event("alarm", alarm=alarm.name, step=alarm.step, evidence=alarm.evidence)
            _tell(self._run.path.name, alarm)
        return new

    def _surroundings(self) -> Surroundings:
        """Count the seconds from look to look, so that a clock that is set neither rings nor silences."""
        around = surroundings(self._run)
        stamps = [path.stat().st_mtime_ns for path in _record_files(self._run)]
        if not self._stamps:
            self._quiet_from = time.monotonic() - around.seconds_since_record
        elif stamps != self._stamps:
            self._quiet_from = time.monotonic()
        self._stamps = stamps
        return replace(around, seconds_since_record=time.monotonic() - self._quiet_from)


def _record_files(run: RunDirectory) -> list[Path]:
    return [path for path in (run.metrics_path, run.events_path) if path.is_file()]


def _tell(run: str, alarm: Alarm) -> None:
    """Post an alarm to the webhook, where there is one; a webhook that fails harms nothing."""
    url = os.environ.get(WEBHOOK_VARIABLE, "").strip()
    if not url:
        return
    guide = alarm.guide
    body = {
        "run": run,
        "alarm": alarm.name,
        "step": alarm.step,
        "evidence": alarm.evidence,
        "text": f"{run}: {alarm.name} at step {alarm.step}: {alarm.evidence}",
        "causes": list(guide.causes),
        "check": guide.check,
    }
    try:
        httpx.post(url, json=body, timeout=_WEBHOOK_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _log.warning("the alarm %s could not be posted: %s", alarm.name, type(error).__name__)
