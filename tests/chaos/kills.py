"""The kill campaign: processes of runs are killed at random moments, and the runs resumed."""

import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.killed_runs import (
    Account,
    Foreground,
    KillableRun,
    Launched,
    Served,
    account,
    faults,
    write_experiment,
)
from tests.chaos.machine import Machine, machine

from pilotage.processes import ProcessIdentity, is_running, kill

_RUN_S = 900.0
"""Longest time of one run with all its kills."""
_POLL_S = 0.002
_GENTLE = frozenset({"worker", "sandbox"})
"""Their death costs one attempt of one rollout, which the table of outcomes allows once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to run a training."""

    name: str
    make: Callable[[Machine, str], KillableRun]
    reference: str
    """Kinds of one name here do the same arithmetic, and share a run that nobody disturbs."""


def _with_worker(machine: Machine, name: str) -> KillableRun:
    return Foreground(machine, name, "rollouts.workers=1", victims=("driver", "worker", "sandbox"))


def _alone(machine: Machine, name: str) -> KillableRun:
    return Foreground(machine, name, victims=("driver", "sandbox"))


KINDS = {
    "alone": Kind(name="alone", make=_alone, reference="local"),
    "served": Kind(name="served", make=Served, reference="served"),
    "worker": Kind(name="worker", make=_with_worker, reference="local"),
    "launched": Kind(name="launched", make=Launched, reference="local"),
}

ORDER = ("alone", "served", "alone", "worker", "alone", "launched")
"""Of a campaign's runs, again and again; what starts fast comes more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: who, when, and how far the run had come."""

    victim: str
    moment: str
    rollouts: int
    """Rollout files that were on disk."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What one disturbed run came to."""

    kind: str
    kills: list[Kill] = field(default_factory=list[Kill])
    faults: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


class _Killer:
    """Kills one process of a run at each of some random moments."""

    def __init__(self, machine: Machine, killable: KillableRun, rng: random.Random) -> None:
        self._machine = machine
        self._killable = killable
        self._rng = rng
        self._spared_since: float | None = None
        self._draw()

    def _draw(self) -> None:
        """Choose the next moment: some seconds after now, or soon after the next thing of a kind happens."""
        self._moment = self._rng.choice(("time", "rollout", "rollout", "record", "checkpoint"))
        self._wait_s = self._rng.uniform(0.5, 15.0) if self._moment == "time" else self._rng.expovariate(8.0)
        self._skip = self._rng.randrange(6) if self._moment == "rollout" else 0
        self._seen = self._traces()
        self._due: float | None = time.monotonic() + self._wait_s if self._moment == "time" else None

    def _traces(self) -> int:
        """Return a number that grows when what the moment waits for happens."""
        path = self._killable.run.path
        if self._moment == "checkpoint":
            return len(list(path.glob("checkpoints/.*.partial")))
        if self._moment == "record":
            return (path / "metrics.jsonl").stat().st_size if (path / "metrics.jsonl").exists() else 0
        return len(self._killable.run.rollout_files())

    def look(self) -> Kill | None:
        """Kill, where the moment has come; the next one is drawn then."""
        if self._due is None:
            traces = self._traces()
            if traces > self._seen + self._skip:
                self._due = time.monotonic() + self._wait_s
            self._seen = min(self._seen, traces)  # a resume forgets what it will do again
        if self._due is None or time.monotonic() < self._due:
            return None
        victims = list(self._victims())
        if not victims:
            return None
        role, process = self._rng.choice(victims)
        if not kill(process):
            return None
        if role in _GENTLE:
            self._spared_since = time.time()
        done = Kill(victim=role, moment=self._moment, rollouts=len(self._killable.run.rollout_files()))
        self._draw()
        return done

    def _victims(self) -> Iterator[tuple[str, ProcessIdentity]]:
        roles = set(self._killable.victims)
        if not self._has_gone_on():
            roles -= _GENTLE
        found = [(member.role, member.process) for member in self._machine.members()]
        found += [("sandbox", process) for process in self._machine.sandboxes() if is_running(process)]
        chosen = self._rng.choice(sorted(roles))
        return ((role, process) for role, process in found if role == chosen)

    def _has_gone_on(self) -> bool:
        """Return whether a rollout has ended since the last gentle kill: no rollout is struck twice."""
        if self._spared_since is None:
            return True
        return any(p.stat().st_mtime > self._spared_since for p in self._killable.run.rollout_files())


def _is_finished(killable: KillableRun) -> bool:
    return any(event["event"] == "finished" for event in killable.run.events())


def _run_to_the_end(killable: KillableRun, killer: _Killer | None, num_kills: int) -> Iterator[Kill]:
    """Keep a run going until it has finished; yields kills as they happen."""
    deadline = time.monotonic() + _RUN_S
    num_done = 0
    next_look = 0.0
    while True:
        if time.monotonic() > next_look:
            if _is_finished(killable):
                return
            killable.keep_going()
            next_look = time.monotonic() + 0.2
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run did not finish within {_RUN_S:.0f} s; {num_done} kills were done")
        if killer is not None and num_done < num_kills and (kill := killer.look()) is not None:
            num_done += 1
            yield kill
        time.sleep(_POLL_S)


def disturbed(
    machine: Machine, kind: Kind, name: str, expected: Account, *, num_kills: int, rng: random.Random
) -> RunResult:
    """Run to the end through at most `num_kills` kills, and say what is not as it should be."""
    killable = kind.make(machine, name)
    result = RunResult(kind=kind.name)
    started = time.monotonic()
    try:
        result.kills += _run_to_the_end(killable, _Killer(machine, killable, rng), num_kills)
        killable.end()
        result.faults += faults(killable.run, expected)
        result.faults += machine.leftovers()
    except TimeoutError as error:
        result.faults.append(str(error))
    result.seconds = time.monotonic() - started
    return result


def undisturbed(machine: Machine, kind: Kind) -> Account:
    """Run to the end without a kill, and return what it did."""
    killable = kind.make(machine, f"{kind.reference}-whole")
    for _ in _run_to_the_end(killable, None, 0):
        pass
    killable.end()
    return account(killable.run)


def campaign(
    count: int, *, seed: int, kinds: Sequence[str] = ORDER, per_run: int = 6, kept: Path | None = None
) -> Generator[RunResult]:
    """Yield one result a run until `count` kills were done.

    Args:
        per_run: most kills of one run.
        kept: gets the directories of runs with a fault.
    """
    rng = random.Random(seed)
    expected: dict[str, Account] = {}
    remaining = count
    with (
        tempfile.TemporaryDirectory(prefix="pilotage-chaos-") as directory,
        machine(Path(directory) / "machine") as made,
    ):
        for number, kind in enumerate(itertools.cycle(KINDS[name] for name in kinds)):
            if remaining <= 0:
                break
            write_experiment(made.root)
            if kind.reference not in expected:
                expected[kind.reference] = undisturbed(made, kind)
            wanted, name = min(remaining, rng.randint(per_run // 2, per_run)), f"run-{number}"
            whole = expected[kind.reference]
            result = disturbed(made, kind, name, whole, num_kills=wanted, rng=rng)
            if result.faults and kept is not None:
                shutil.copytree(made.root, kept / name, symlinks=True, ignore_dangling_symlinks=True)
            made.clear()
            yield result
            remaining -= len(result.kills)
