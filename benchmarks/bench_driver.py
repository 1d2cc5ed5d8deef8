"""One driver with 512 rollouts at once: lag of its event loop, its memory, its files, and errors.

The driver's process has what a live one has: the training loop, a run directory, and the proxy on loopback
behind uvicorn. Simulated are the policy, which answers after its time with 64 tokens, the trainer, and the
agents: programs of their own that send a real conversation over HTTP, 22 KB of prompt and tools at the start
and 1.6 KB more each turn, with a pause for their tools.

    python benchmarks/bench_driver.py [SECONDS] [--rollouts 512]
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import override

import httpx
import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_proxy import Agent, FreeRenderer, InstantSampler, over_socket
from tests.loops.rig import CountingTrainer, Watcher, make_tasks

from pilotage.loops import LoopSettings, RunDirectory, TrainingLoop
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import (
    Completion,
    Outcome,
    Reward,
    Rollout,
    RolloutRequest,
    SamplingParams,
    SessionAccess,
    SessionSpec,
    TokenIds,
)

TURNS = 30
GROUP_SIZE = 8
AGENT_PROCESSES = 2
_TURN_TOKENS = 400
_PROBE_S = 0.02


class SlowSampler(InstantSampler):
    """Answers after 2 to 12 seconds, as a server under load does."""

    num_calls = 0

    @override
    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """Return what the instant one does."""
        self.num_calls += 1
        rng = np.random.default_rng([params.seed or 0, turn_index])
        await asyncio.sleep(rng.uniform(2, 12))
        return await super().sample(prompt_ids, params, session_id=session_id, turn_index=turn_index)


class Agents:
    """A process that plays agents: an access a line in, what went wrong a line out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> "Agents":
        """Start it."""
        command = [sys.executable, __file__, "--agents"]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def play(self, access: SessionAccess) -> str:
        """Run one agent to its end; returns what went wrong, or nothing."""
        assert self._process.stdin is not None
        ended = self._waiting[access.api_key] = asyncio.get_running_loop().create_future()
        line = orjson.dumps(asdict(access))
        self._process.stdin.write(line + b"\n")
        return await ended

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = orjson.loads(line)
            ended = self._waiting.pop(said["key"])
            if not ended.done():
                ended.set_result(said["error"])

    async def close(self) -> None:
        """End it."""
        self._process.kill()
        await self._process.wait()
        await self._reading


async def play_agents() -> None:
    """Read accesses from standard input, and play an agent for each."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    playing: set[asyncio.Task[None]] = set()
    async for line in reader:
        playing.add(asyncio.create_task(_play_one(orjson.loads(line))))
        for task in [task for task in playing if task.done()]:
            playing.remove(task)
            task.result()


async def _play_one(access: dict[str, str]) -> None:
    error = ""
    try:
        # A client for each, as each agent has one: with one for all, httpx looks through every connection.
        async with httpx.AsyncClient(timeout=120) as client:
            post = over_socket(client, SessionAccess(**access))
            agent = Agent(post, start_tokens=0)
            for _ in range(TURNS):
                await agent.turn(_TURN_TOKENS)
                await asyncio.sleep(1)
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    sys.stdout.buffer.write(orjson.dumps({"key": access["api_key"], "error": error}) + b"\n")
    sys.stdout.buffer.flush()


@dataclass(slots=True, kw_only=True)
class SimulatedRunner:
    """Rollouts whose agent is a client in another process."""

    proxy: ChatCompletionsProxy
    agents: Sequence[Agents]
    slots: asyncio.Semaphore
    errors: list[str] = field(default_factory=list[str])
    under_way: int = 0
    num_started: int = 0

    async def run(self, request: RolloutRequest) -> Rollout:
        """See `RolloutRunner`."""
        async with self.slots:
            self.under_way += 1
            self.num_started += 1
            access = self.proxy.open(
                SessionSpec(rollout_id=request.id, sampling=request.sampling, ttl_s=7200)
            )
            try:
                # As many start at once as there are slots; a real driver's sandboxes take their time too.
                await asyncio.sleep(np.random.default_rng(request.sampling.seed).uniform(0, 10))
                error = await self.agents[self.num_started % len(self.agents)].play(access)
            finally:
                record = await self.proxy.close(access)
                self.under_way -= 1
        if error:
            self.errors.append(error)
        value = float(np.random.default_rng(request.sampling.seed).random())
        return Rollout(
            id=request.id,
            group_id=request.group_id,
            task_id=request.task.id,
            attempt=0,
            outcome=Outcome.COMPLETED,
            reward=Reward(value=value, key="reward", source="simulated"),
            trajectory=record.trajectory,
            counters=record.counters,
        )


def resident_mib() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch_lag(lags_s: list[float]) -> None:
    """Measure how late the event loop wakes a task that sleeps for 20 ms."""
    while True:
        due = time.perf_counter() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        lags_s.append(max(0.0, time.perf_counter() - due))


async def drive(seconds: float, rollouts: int) -> None:
    """Run for so long, and print what was measured."""
    sampler = SlowSampler()
    proxy = ChatCompletionsProxy(sampler, FreeRenderer())
    settings = LoopSettings(
        num_steps=10_000,
        tasks_per_step=rollouts // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_lag=1,
        checkpoint_every_steps=1_000,
        sampling=SamplingParams(),
    )
    agents = [await Agents.start() for _ in range(AGENT_PROCESSES)]
    runner = SimulatedRunner(proxy=proxy, agents=agents, slots=asyncio.Semaphore(rollouts))
    lags_s: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        with RunDirectory.open(path, {"name": "driver"}, resume=False) as run:
            async with serve(proxy):
                loop = TrainingLoop(
                    trainer=CountingTrainer(),
                    runner=runner,
                    run=run,
                    train_tasks=make_tasks("train", 1000),
                    held_out_tasks=[],
                    settings=settings,
                    observer=Watcher(),
                )
                before_mib, cpu_s = resident_mib(), -time.process_time()
                training = asyncio.create_task(loop.run())
                probe = asyncio.create_task(watch_lag(lags_s))
                for part in range(1, 5):
                    await asyncio.wait([training], timeout=seconds / 4)
                    if training.done():
                        break
                    files = len(os.listdir("/proc/self/fd"))
                    print(
                        f"{part * seconds / 4:6.0f} s  {runner.under_way} rollouts at once,"
                        f" {sampler.num_calls} turns, {resident_mib():.0f} MiB, {files} files,"
                        f" load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
                cpu_s += time.process_time()
                probe.cancel()
                training.cancel()
                peak_mib = resident_mib()
                await asyncio.wait([training])
                finished = len(run.rollout_files())
    for process in agents:
        await process.close()
    lag_ms = np.quantile(lags_s, (0.5, 0.99, 0.999, 1.0)) * 1e3
    print(
        f"lag of the event loop: p50 {lag_ms[0]:.1f}, p99 {lag_ms[1]:.1f}, p99.9 {lag_ms[2]:.1f}, longest"
        f" {lag_ms[3]:.1f} ms; {finished} rollouts on disk, {len(runner.errors)} errors"
        f" {sorted(set(runner.errors))[:3]};"
        f" memory {before_mib:.0f} MiB before, {peak_mib:.0f} at the end:"
        f" {(peak_mib - before_mib) / rollouts:.2f} for each at once;"
        f" {cpu_s / max(sampler.num_calls, 1) * 1e3:.1f} ms of CPU a turn"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure a driver with many rollouts at once.")
    parser.add_argument("seconds", nargs="?", type=float, default=900)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(play_agents() if arguments.agents else drive(arguments.seconds, arguments.rollouts))
