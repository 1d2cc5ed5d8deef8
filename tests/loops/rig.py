"""A trainer and a runner of a few lines each: real arithmetic, no model."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pilotage.errors import TrainerError
from pilotage.files import write_atomically
from pilotage.loops import LoopSettings, RunDirectory, TrainingLoop
from pilotage.trackers import TrackedRun, TrackerName, open_trackers
from pilotage.types import (
    OUTCOME_RULES,
    AdamParams,
    BranchCause,
    Denominators,
    FinishReason,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Outcome,
    Reward,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Sample,
    StepResult,
    Task,
    Trajectory,
    Turn,
    token_ids,
)


@dataclass(slots=True, kw_only=True)
class CountingTrainer:
    """Its weights are one number, the sum of all advantages that it was trained on."""

    fails_in_step: int | None = None
    """The n-th optimizer step, from 1, raises before anything is applied."""
    weights: float = 0.0
    version: int = 0
    num_steps: int = 0
    pending: float | None = None
    trained: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(optimizer step, rollout) of every sample that was applied."""
    _batch: list[str] = field(default_factory=list[str])

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        self.pending = sum(float(sample.advantages.sum()) for sample in samples)
        self._batch = [sample.sequence_id for sample in samples]
        return ForwardBackwardResult(
            loss=-self.pending,
            trained_tokens=sum(sample.trained_tokens for sample in samples),
            forwarded_tokens=sum(sample.token_ids.size for sample in samples),
            num_sequences=len(set(self._batch)),
            logprob_gap_mean=0.0,
            logprob_gap_max=0.0,
            gap_k3=0.0,
            clip_fraction=0.0,
            trainer_logprobs_n=np.concatenate(
                [sample.sampler_logprobs[sample.loss_mask] + np.float32(0.25) for sample in samples]
            ),
        )

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        return [np.zeros(sample.token_ids.size, np.float32) for sample in samples]

    async def step(self, params: AdamParams) -> StepResult:
        if self.num_steps + 1 == self.fails_in_step:
            raise TrainerError("the machine went away")
        assert self.pending is not None
        self.num_steps += 1
        self.weights += self.pending
        self.trained += [(self.num_steps, name) for name in self._batch]
        result = StepResult(grad_norm=abs(self.pending), learning_rate=params.learning_rate, num_backwards=1)
        self.pending = None
        return result

    async def discard(self) -> None:
        self.pending = None

    async def publish(self) -> int:
        self.version += 1
        return self.version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(exist_ok=True)  # instant, and nothing else runs
        write_atomically(
            partial / "weights.txt", f"{self.weights!r} {self.version} {self.num_steps}".encode()
        )
        partial.rename(directory)

    async def load(self, directory: Path) -> None:
        weights, version, steps = (directory / "weights.txt").read_text().split()
        # `publish` follows a load, and gives the version that was published when it was saved.
        self.weights, self.version, self.num_steps = float(weights), int(version) - 1, int(steps)


@dataclass(slots=True, kw_only=True)
class SeededRunner:
    """Rewards are drawn from the request's own seed, so a run that is done again gets them again."""

    trainer: CountingTrainer
    spread: float = 1.0
    """0 gives every rollout the same reward."""
    failing: frozenset[str] = frozenset()
    """Ids of rollouts whose agent crashes."""
    ends: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    """How rollouts end that neither complete nor crash, by id."""
    requests: list[RolloutRequest] = field(default_factory=list[RolloutRequest])

    async def run(self, request: RolloutRequest) -> Rollout:
        self.requests.append(request)
        await asyncio.sleep(0)
        rng = np.random.default_rng(request.sampling.seed)
        outcome = Outcome.AGENT_ERROR if request.id in self.failing else Outcome.COMPLETED
        outcome = self.ends.get(request.id, outcome)
        has_failed = not OUTCOME_RULES[outcome].has_reward
        value = float(rng.random()) * self.spread
        return Rollout(
            id=request.id,
            group_id=request.group_id,
            task_id=request.task.id,
            attempt=int(has_failed),
            outcome=outcome,
            reward=None
            if has_failed
            else Reward(value=value, key="reward", source="r", components={"f1": value}),
            trajectory=self._trajectory(request),
            failure=RolloutFailure(where="agent", message="it crashed", advice="read its log")
            if has_failed
            else None,
            counters={"requests": 2},
        )

    def _trajectory(self, request: RolloutRequest) -> Trajectory:
        """Two turns of three and two sampled tokens, the second of which branches off."""

        def turn(completion: list[int], cause: BranchCause | None) -> Turn:
            return Turn(
                parent=None,
                branch_cause=cause,
                context_ids=token_ids([1, 2]),
                completion_ids=token_ids(completion),
                logprobs=np.full(len(completion), math.log(0.5), np.float32),
                weights_versions=np.full(len(completion), self.trainer.version, np.int32),
                finish_reason=FinishReason.STOP,
                sampling=request.sampling,
                started_at=0.0,
                finished_at=1.0,
            )

        return Trajectory(turns=(turn([3, 4, 5], None), turn([6, 7], BranchCause.COMPACTION)))


TOKENS_PER_ROLLOUT = 5


@dataclass(slots=True)
class Watcher:
    """An `Observer` that keeps what it saw, and calls `on_event` at its n-th sight."""

    on_event: Callable[[], object] | None = None
    at_event: int = -1
    num_events: int = 0

    phases: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    rollouts: list[str] = field(default_factory=list[str])

    def _see(self) -> None:
        self.num_events += 1
        if self.num_events == self.at_event and self.on_event is not None:
            self.on_event()

    def on_phase(self, phase: str, step: int, total: int) -> None:
        self._see()
        self.phases.append((phase, step, total))

    def on_rollout(self, rollout: Rollout) -> None:
        self._see()
        self.rollouts.append(rollout.id)

    def on_record(self, record: dict[str, float]) -> None:
        self._see()
        self.records.append(record)


def make_tasks(name: str, count: int) -> list[Task]:
    return [Task(id=f"{name}/{index}", path=Path(f"/{name}/{index}")) for index in range(count)]


@dataclass(slots=True, kw_only=True)
class Rig:
    """A loop with its parts, as one process holds them."""

    settings: LoopSettings
    trainer: CountingTrainer = field(default_factory=CountingTrainer)
    spread: float = 1.0
    failing: frozenset[str] = frozenset()
    ends: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    num_held_out: int = 2
    watcher: Watcher = field(default_factory=Watcher)
    runner: SeededRunner = field(init=False)

    def __post_init__(self) -> None:
        self.runner = SeededRunner(
            trainer=self.trainer, spread=self.spread, failing=self.failing, ends=self.ends
        )

    async def run(
        self, path: Path, *, resume: bool = False, loggers: Sequence[TrackerName] = ()
    ) -> list[tuple[str, str]]:
        """Run to the end; return what trackers failed with."""
        failures: list[tuple[str, str]] = []
        with (
            RunDirectory.open(path, {"name": "demo"}, resume=resume) as run,
            open_trackers(
                loggers,
                TrackedRun(
                    name=path.name,
                    project="demo",
                    directory=path / "trackers",
                    config={"name": "demo", "loop": {"seed": 0}},
                    records=run.kept_metrics(),
                ),
                lambda name, message: failures.append((name, message)),
            ) as sinks,
        ):
            loop = TrainingLoop(
                trainer=self.trainer,
                runner=self.runner,
                run=run,
                train_tasks=make_tasks("train", 3),
                held_out_tasks=make_tasks("held_out", self.num_held_out),
                settings=self.settings,
                observer=self.watcher,
                sinks=sinks,
            )
            await loop.run()
        return failures
