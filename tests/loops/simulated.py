"""A sampler with slots and a trainer, as latencies only; the loop between them is the real one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import override

import numpy as np
from tests.loops.rig import CountingTrainer, SeededRunner, Watcher, make_tasks

from pilotage.loops import LoopSettings, RunDirectory, TrainingLoop
from pilotage.types import (
    AdamParams,
    Denominators,
    ForwardBackwardResult,
    LossConfig,
    Rollout,
    RolloutRequest,
    Sample,
    StepResult,
    Trajectory,
)

type Latency = Callable[[np.random.Generator], float]
"""Draws the seconds of one rollout."""


@dataclass(slots=True, kw_only=True)
class SlowTrainer(CountingTrainer):
    """Takes its time for each update."""

    train_s: float
    publish_s: float = 0.0

    @override
    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        await asyncio.sleep(self.train_s)
        return await CountingTrainer.forward_backward(self, samples, loss, denominators=denominators)

    @override
    async def step(self, params: AdamParams) -> StepResult:
        return await CountingTrainer.step(self, params)

    @override
    async def publish(self) -> int:
        await asyncio.sleep(self.publish_s)
        return await CountingTrainer.publish(self)


@dataclass(slots=True, kw_only=True)
class SlowRunner(SeededRunner):
    """Runs so many rollouts at once, first come, first served; a rollout's time is drawn from its seed.

    The first turn of a rollout is sampled when it starts, the other when it ends.
    """

    latency: Latency
    concurrency: int
    most_at_once: int = 0
    _slots: asyncio.Semaphore = field(init=False)
    _running: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)

    @override
    async def run(self, request: RolloutRequest) -> Rollout:
        async with self._slots:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            version = self.trainer.version
            await asyncio.sleep(self.latency(np.random.default_rng(request.sampling.seed)))
            self._running -= 1
            rollout = await SeededRunner.run(self, request)
        first, *others = rollout.trajectory.turns
        first = replace(first, weights_versions=np.full_like(first.weights_versions, version))
        return replace(rollout, trajectory=Trajectory(turns=(first, *others)))


@dataclass(slots=True, kw_only=True)
class Simulation:
    """A run on a virtual clock."""

    settings: LoopSettings
    latency: Latency
    train_s: float
    publish_s: float = 0.0
    concurrency: int = 10_000
    spread: float = 1.0
    trainer: SlowTrainer = field(init=False)
    runner: SlowRunner = field(init=False)
    watcher: Watcher = field(default_factory=Watcher)

    async def run(self, path: Path, *, resume: bool = False) -> list[dict[str, float]]:
        """Run to the end and return the records."""
        self.trainer = SlowTrainer(train_s=self.train_s, publish_s=self.publish_s)
        self.runner = SlowRunner(
            trainer=self.trainer, latency=self.latency, concurrency=self.concurrency, spread=self.spread
        )
        config = {"name": "simulated", "loop": self.settings.model_dump(mode="json", exclude_none=True)}
        with RunDirectory.open(path, config, resume=resume) as run:
            loop = TrainingLoop(
                trainer=self.trainer,
                runner=self.runner,
                run=run,
                train_tasks=make_tasks("train", 50),
                held_out_tasks=[],
                settings=self.settings,
                observer=self.watcher,
            )
            await loop.run()
            return run.metrics()
