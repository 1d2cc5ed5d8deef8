"""Three ways to run a training that may be killed anywhere and is then resumed, and what must be true of it.

    Foreground: `pilotage train` in a terminal       Launched: supervisor, tmux, driver
    Served: `pilotage serve` and a driver of its job

Every model call is decoded alone (`max_batch = 1`, one rollout at a time), so that what is sampled, and with
it the weights, does not depend on which calls met in a batch: two runs that are the same are so bit for bit.
"""

import hashlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.chaos.machine import ROOT, Machine
from tests.rollouts.rig import write_task

from pilotage.client.remote_checkpoint import FILE_NAME, RemoteCheckpoint
from pilotage.loops import RunDirectory, read_rollout
from pilotage.loops.summaries import read_summaries
from pilotage.pid_lock import holder
from pilotage.processes import ProcessIdentity, is_running, wait_until_gone

NUM_STEPS = 5
RECIPE = """
name = "killed"
[policy]
model = "{model}"
max_context_tokens = 256
max_batch = 1
[tasks]
train = ["tasks"]
held_out = ["held_out"]
[rollouts]
agent = "tests.chaos.agents:Teller"
concurrency = 1
workers = 0
[loop]
num_steps = {num_steps}
tasks_per_step = 2
group_size = 2
checkpoint_every_steps = 2
sampling.max_tokens = 6
evaluation.every_steps = 3
optimizer.learning_rate = 1e-3
[job]
lease_s = 10
"""
_REWARD = "#!/bin/bash\nset -- $(cksum < /logs/agent/said)\necho $(($1 % 8)) > /logs/verifier/reward.txt\n"
_ANSWER_S = 60.0
_COMPARED = ("reward/", "policy/", "optim/", "eval/", "weights_version", "ledger/trained_tokens")
"""Of a record: what killing a process must not change. Times, and what failed attempts cost, may differ."""


def write_experiment(root: Path) -> None:
    """Write tasks whose reward follows from what the policy said, and the recipe."""
    for name in ("a", "b", "c"):
        write_task(root / "tasks", name, test_sh=_REWARD)
    write_task(root / "held_out", "d", test_sh=_REWARD)
    (root / "held_out" / "d" / "instruction.md").write_text("Say where the bug is.\n")
    model = ROOT / "recipes" / "demo" / "policy"
    (root / "recipe.toml").write_text(RECIPE.format(model=model, num_steps=NUM_STEPS))


class KillableRun(Protocol):
    """A run in one of the ways to run it."""

    @property
    def victims(self) -> Sequence[str]:
        """Roles of the processes that may be killed; `sandbox` is the first process of one."""
        ...

    @property
    def run(self) -> RunDirectory:
        """Where it writes."""
        ...

    def keep_going(self) -> None:
        """Start again whatever of it has ended, as a person or an init system would."""
        ...

    def end(self) -> None:
        """End what does not end with the run."""
        ...


class Foreground:
    """`pilotage train`, given again with --resume where it has got as far as its first event."""

    def __init__(self, machine: Machine, name: str, *overrides: str, victims: Sequence[str]) -> None:
        self.victims = victims
        self.run = RunDirectory(machine.root / "runs" / name)
        self._machine = machine
        self._words = ("train", "recipe.toml", *overrides, "--run-name", name)
        self._driver: ProcessIdentity | None = None

    def keep_going(self) -> None:
        if self._driver is None or not is_running(self._driver):
            resume = ["--resume"] if self.run.events_path.is_file() else []
            self._driver = self._machine.fork(f"{self.run.path.name}.log", *self._words, *resume)

    def end(self) -> None:
        if self._driver is not None:
            wait_until_gone([self._driver], _ANSWER_S)


class Launched:
    """`pilotage launch`, then `pilotage resume`."""

    victims = ("supervisor", "driver", "worker", "sandbox", "terminal")

    def __init__(self, machine: Machine, name: str) -> None:
        self.run = RunDirectory(machine.root / "runs" / name)
        self._machine = machine

    def keep_going(self) -> None:
        if holder(self.run.launcher_path) is not None or holder(self.run.lock_path) is not None:
            return
        words = ["launch", "recipe.toml", "rollouts.workers=1", "--run-name", self.run.path.name]
        if self.run.events_path.is_file():
            words = ["resume", str(self.run.path)]
        done = self._machine.pilotage(*words)
        if done.returncode:
            with (self._machine.root / f"{self.run.path.name}.log").open("a") as log:
                log.write(done.stderr)
            time.sleep(0.5)

    def end(self) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while holder(self.run.launcher_path) is not None and time.monotonic() < deadline:
            time.sleep(0.05)


class Served:
    """A training service on a port of its own, and the driver of a run on it."""

    victims = ("service", "engine", "driver")

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self._service: subprocess.Popen[bytes] | None = None
        self._name = name
        self._port = 0
        self._driver = Foreground(machine, name, "backend=cortex", victims=())
        self.run = self._driver.run

    def keep_going(self) -> None:
        if self._service is None or self._service.poll() is not None:
            self._service = self._serve()
            self._machine.environment["ARCTIC_CORTEX_BASE_URL"] = f"http://127.0.0.1:{self._port}"
        self._driver.keep_going()

    def end(self) -> None:
        self._driver.end()
        if self._service is not None:
            self._service.send_signal(signal.SIGTERM)
            self._service.wait(_ANSWER_S)

    def _serve(self) -> "subprocess.Popen[bytes]":
        log = self._machine.root / f"{self._name}-service.log"
        said = log.stat().st_size if log.exists() else 0
        models = str(ROOT / "recipes" / "demo")
        words = (
            "serve",
            "--no-auth",
            "--models",
            models,
            "--data",
            f"services/{self._name}",
            "--port",
            str(self._port),
        )
        service = self._machine.start(log.name, *words)
        deadline = time.monotonic() + _ANSWER_S
        while service.poll() is None and time.monotonic() < deadline:
            if (address := log.read_text()[said:].partition("http://127.0.0.1:")[2]) and not self._port:
                self._port = int(address.split()[0])
            if address:
                break
            time.sleep(0.02)
        return service


# --- what must be true of a run that has finished ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a finished run did, without times and places."""

    rollouts: Counter[tuple[str, ...]]
    """(folder, id, task, outcome, reward, digest of every token and log-prob) of each."""
    records: list[dict[str, float]]
    weights: str
    """Digest of weights and optimizer after the last step."""


def account(run: RunDirectory) -> Account:
    """Read what a finished run did."""
    rollouts: Counter[tuple[str, ...]] = Counter()
    for path in run.rollout_files():
        rollout = read_rollout(path)
        turns = [(turn.context_ids, turn.completion_ids, turn.logprobs) for turn in rollout.trajectory.turns]
        digest = hashlib.sha256(b"".join(array.tobytes() for turn in turns for array in turn)).hexdigest()
        reward = "none" if rollout.reward is None else repr(rollout.reward.value)
        rollouts[path.parent.name, rollout.id, rollout.task_id, rollout.outcome, reward, digest] += 1
    records = [
        {key: value for key, value in record.items() if key.startswith(_COMPARED)} for record in run.metrics()
    ]
    return Account(rollouts=rollouts, records=records, weights=_weights(run))


def _weights(run: RunDirectory) -> str:
    directory = run.checkpoint(NUM_STEPS)
    if (directory / FILE_NAME).is_file():
        saved = RemoteCheckpoint.read(directory)
        jobs = run.path.parents[1] / "services" / run.path.name / "jobs"
        directory = jobs / saved.job_id / "checkpoints" / saved.record.checkpoint_id
    files = sorted(directory.glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def faults(run: RunDirectory, expected: Account) -> Iterator[str]:
    """Say what of a finished run is not as in the run that nobody disturbed."""
    found = account(run)
    for rollout, count in (expected.rollouts - found.rollouts).items():
        yield f"rollout {'/'.join(rollout[:2])} is missing or differs ({count})"
    for rollout, count in (found.rollouts - expected.rollouts).items():
        yield f"rollout {'/'.join(rollout[:5])} is too many or differs ({count})"
    steps = [int(record["step"]) for record in run.metrics()]
    if steps != list(range(NUM_STEPS + 1)):
        yield f"metrics.jsonl has the steps {steps}"
    for number, (record, wanted) in enumerate(zip(found.records, expected.records, strict=False)):
        keys = sorted(key for key in record.keys() | wanted.keys() if record.get(key) != wanted.get(key))
        if keys:
            yield f"the record of step {number} differs in {', '.join(keys)}"
    if found.weights != expected.weights:
        yield f"the weights are {found.weights[:12]}, not {expected.weights[:12]}"
    yield from _broken_files(run)


def _broken_files(run: RunDirectory) -> Iterator[str]:
    lines = run.events_path.read_bytes().splitlines()
    if len(run.events()) != len(lines):
        yield f"{len(lines) - len(run.events())} lines of events.jsonl cannot be read"
    finished = sum(event["event"] == "finished" for event in run.events())
    if finished != 1:
        yield f"{finished} events say that the run has finished"
    for folder in sorted((run.path / "rollouts").iterdir()):
        ids = sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))
        lines, _ = read_summaries(folder)
        if sorted({line.summary.id for line in lines}) != ids:
            yield f"{folder.name}/summaries.jsonl does not list the folder's rollouts"
