"""Where a run stands: one record, read from its directory and from the locks that living processes hold."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pilotage.loops.run_directory import RunDirectory
from pilotage.ops.alarms import find_alarms
from pilotage.ops.report import training_steps
from pilotage.ops.watch import surroundings
from pilotage.pid_lock import holder

_REWARD_STEPS = 10


class RunState(StrEnum):
    """What a run is doing."""

    STARTING = "starting"
    """A launcher lives, its driver does not yet, or not any more."""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Somebody stopped it; it can be resumed."""
    GAVE_UP = "gave up"
    """Its driver crashed too often."""
    DEAD = "dead"
    """It was killed, or its machine went down; it can be resumed."""


_STARTS = ("started", "resumed")
_ENDS = {"finished": RunState.FINISHED, "stopped": RunState.STOPPED, "gave_up": RunState.GAVE_UP}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run stands; what is not known is None."""

    name: str
    path: str
    state: RunState
    launcher_pid: int | None
    driver_pid: int | None
    job_id: str | None
    step: int | None
    """Last finished step."""
    num_steps: int
    checkpoint: int | None
    reward_mean: float | None
    """Mean of the last ten steps' mean rewards."""
    seconds_since_record: float | None
    failed_rollouts: int
    alarms: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def read_status(run: RunDirectory) -> RunStatus:
    """Return where a run stands."""
    launcher, driver = holder(run.launcher_path), holder(run.lock_path)
    records = run.metrics()
    around = surroundings(run)
    state = _state(run, launcher, driver)
    rewards = [record["reward/mean"] for record in training_steps(records)][-_REWARD_STEPS:]
    is_alive = state in (RunState.RUNNING, RunState.STARTING)
    job = run.path / "job_id"
    return RunStatus(
        name=run.path.name,
        path=str(run.path),
        state=state,
        launcher_pid=launcher,
        driver_pid=driver,
        job_id=job.read_text().strip() if job.is_file() else None,
        step=int(records[-1]["step"]) if records else None,
        num_steps=run.config()["loop"]["num_steps"] if run.config_path.is_file() else 0,
        checkpoint=run.newest_checkpoint(),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        seconds_since_record=around.seconds_since_record if records else None,
        failed_rollouts=sum(1 for _ in (run.path / "errors").glob("*.error")),
        alarms=tuple(alarm.name for alarm in find_alarms(records, around if is_alive else None)),
    )


def _state(run: RunDirectory, launcher: int | None, driver: int | None) -> RunState:
    if driver is not None:
        return RunState.RUNNING
    if launcher is not None:
        return RunState.STARTING
    return how_it_ended(run.events())


def how_it_ended(events: Sequence[Mapping[str, Any]]) -> RunState:
    """Return what the events of a run that nobody holds say: the last start or end among them decides."""
    for event in reversed(events):
        if event["event"] in _STARTS:
            return RunState.DEAD
        if event["event"] in _ENDS:
            return _ENDS[event["event"]]
    return RunState.DEAD


def format_status(status: RunStatus) -> str:
    """Return a status as a few lines for a person."""
    lines = [f"{status.name}: {status.state}"]
    if status.step is not None:
        age = "" if status.seconds_since_record is None else f", {_age(status.seconds_since_record)} ago"
        reward = "" if status.reward_mean is None else f", reward {status.reward_mean:.3f} (last 10 steps)"
        lines.append(f"  step {status.step} of {status.num_steps}{age}{reward}")
    if status.launcher_pid is not None:
        lines.append(f"  launcher {status.launcher_pid}, driver {status.driver_pid or 'not up'}")
    if status.job_id is not None:
        lines.append(f"  job {status.job_id}")
    if status.failed_rollouts:
        lines.append(f"  {status.failed_rollouts} failed rollouts: {status.path}/errors")
    lines += [f"  ALARM {name}: see docs/troubleshooting.md#{name}" for name in status.alarms]
    if status.state in (RunState.STOPPED, RunState.DEAD, RunState.GAVE_UP):
        kept = "no checkpoint" if status.checkpoint is None else f"checkpoint after step {status.checkpoint}"
        lines.append(f"  {kept}; `pilotage resume {status.path}` goes on")
    return "\n".join(lines)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
