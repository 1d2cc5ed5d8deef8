"""What rollouts cost: a sandboxed trial against a bare one, and many OpenHands rollouts at once.

    python benchmarks/bench_rollouts.py overhead [--pairs 40]
    python benchmarks/bench_rollouts.py concurrent [--levels 1 8 32 64] [--workers 2]
    python benchmarks/bench_rollouts.py demo [--steps 3]

`overhead`: Harbor's Trial with the no-op agent in a plain local-process environment (bare) against the same
through HarborRunner and HostEnvironment, in pairs, so that a busy machine slows both; then the latter in a
worker process, which looks through a task once. `concurrent`: OpenHands rollouts of five model calls (four
tools and the hand-in) against a policy without latency. `demo`: the rollouts of the demo's first steps,
recipe, tasks (`make demo` makes them) and policy as they are, without training.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from tests.rollouts.rig import HAND_IN, policy, request_for, write_task

from pilotage.datasets.harbor_tasks import load_tasks
from pilotage.loops import LoopSettings
from pilotage.loops.requests import group_requests, task_of_group
from pilotage.recipes.config import load_recipe
from pilotage.recipes.stack import open_stack
from pilotage.rollouts.local_workers import LocalProcess
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.third_party import prepare
from pilotage.rollouts.trial import AgentChoice
from pilotage.types import Outcome, RolloutRequest, Task

_DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"


class BareEnvironment(BaseEnvironment):
    """The least a Harbor environment can be: a directory, bash, and paths rewritten by text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.root = Path(tempfile.mkdtemp(prefix="bare-"))

    @staticmethod
    @override
    def type() -> str:
        return "bare"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @override
    def _validate_definition(self) -> None: ...

    def _moved(self, text: str) -> str:
        for top in ("/logs", "/tests", "/workspace"):
            text = text.replace(top, f"{self.root}{top}")
        return text

    @override
    async def start(self, force_build: bool) -> None:
        for name in ("logs/agent", "logs/verifier", "logs/artifacts", "tests"):
            (self.root / name).mkdir(parents=True)
        shutil.copytree(self.environment_dir, self.root / "workspace")

    @override
    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._moved(command)),
            cwd=self.root / "workspace",
            env={"PATH": os.environ["PATH"], **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy2(source_path, self._moved(target_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = self.root / target_dir.lstrip("/")
        shutil.copytree(source_dir, target, dirs_exist_ok=True)
        for script in target.glob("*.sh"):
            script.write_text(self._moved(script.read_text()))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy2(self._moved(source_path), target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._moved(source_dir), target_dir, dirs_exist_ok=True)


async def bare_trial(task: Task, trials: Path) -> float:
    started = time.perf_counter()
    config = TrialConfig(
        task=TaskConfig(path=task.path),
        trial_name=f"bare-{uuid.uuid4().hex[:8]}",
        trials_dir=trials,
        agent=AgentConfig(name="nop"),
        environment=EnvironmentConfig(import_path=f"{__name__}:BareEnvironment"),
    )
    trial = await Trial.create(config)
    result = await trial.run()
    assert result.exception_info is None, result.exception_info
    shutil.rmtree(trial.paths.trial_dir)
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """Return CPU time of this process and its ended children: steady on a busy machine."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


async def overhead(num_pairs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(Path(directory) / "tasks")
        trials = Path(directory) / "trials"
        settings = RunnerSettings(trials_directory=trials, agent=AgentChoice(name="nop"), workers=0)
        bare: list[float] = []
        ours: list[float] = []
        cpu_bare = cpu_ours = 0.0
        async with policy() as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
            for pair in range(num_pairs + 3):
                cpu_at = [cpu_seconds()]
                bare_s = await bare_trial(task, trials)
                cpu_at.append(cpu_seconds())
                started = time.perf_counter()
                rollout = await runner.run(request_for(task, f"pair-{pair}"))
                ours_s = time.perf_counter() - started
                assert rollout.outcome == Outcome.COMPLETED, rollout.failure
                if pair >= 3:  # the first ones import and fill caches
                    cpu_bare += cpu_at[1] - cpu_at[0]
                    cpu_ours += cpu_seconds() - cpu_at[1]
                    bare.append(bare_s)
                    ours.append(ours_s)
        in_worker = await trials_in_worker(task, trials, num_pairs)
    ratios = sorted(mine / theirs for mine, theirs in zip(ours, bare, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"{num_pairs} pairs: bare {1e3 * statistics.median(bare):.1f} ms (best {1e3 * min(bare):.1f})")
    print(f"runner + sandbox {1e3 * statistics.median(ours):.1f} ms (best {1e3 * min(ours):.1f})")
    print(f"ratio: median {quartiles[1]:.2f}, quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f};")
    print(f"best against best {min(ours) / min(bare):.2f}")
    print(f"CPU a trial: bare {1e3 * cpu_bare / num_pairs:.1f} ms,", end=" ")
    print(f"runner + sandbox {1e3 * cpu_ours / num_pairs:.1f} ms, ratio {cpu_ours / cpu_bare:.2f}")
    print(f"the same in a worker process, as runs do, {1e3 * in_worker:.1f} ms, ratio", end=" ")
    print(f"{in_worker * num_pairs / cpu_bare:.2f}")


async def trials_in_worker(task: Task, trials: Path, count: int) -> float:
    """Return CPU seconds a trial, of driver, worker and sandbox, where one worker runs them one by one."""
    settings = RunnerSettings(trials_directory=trials, agent=AgentChoice(name="nop"), workers=1)
    async with policy() as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        for number in range(3):
            await runner.run(request_for(task, f"warm-{number}"))
        pids = await worker_pids(runner)
        before = sum(parts_cpu_s(pids).values())
        for number in range(count):
            rollout = await runner.run(request_for(task, f"worker-{number}"))
            assert rollout.outcome == Outcome.COMPLETED, rollout.failure
        return (sum(parts_cpu_s(pids).values()) - before) / count


def process_cpu_s(pid: int) -> tuple[float, float]:
    """Return CPU seconds of a process itself, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, child_user, child_system = (
        int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]
    )
    return user + system, child_user + child_system


def parts_cpu_s(workers: list[int]) -> dict[str, float]:
    """Return CPU seconds so far of the driver, its workers, and the programs of their sandboxes."""
    driver, driver_children = process_cpu_s(os.getpid())
    own = [process_cpu_s(pid) for pid in workers if pid != os.getpid()]
    return {
        "driver": driver,
        "workers": sum(mine for mine, _ in own),
        "sandboxes": driver_children + sum(children for _, children in own),
    }


def rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


async def worker_pids(runner: HarborRunner) -> list[int]:
    """Return the runner's processes; this one where there are no others."""
    if runner._workers is None:
        return [os.getpid()]
    processes = [worker.process for worker in await runner._workers._pool.workers()]
    return [process.child.pid for process in processes if isinstance(process, LocalProcess)]


def in_parts(before: dict[str, float], now: dict[str, float], count: int) -> str:
    """Say how many CPU milliseconds each of `count` rollouts took, and where."""
    ms = {part: 1e3 * (now[part] - before[part]) / count for part in now}
    parts = ", ".join(f"{part} {value:.0f}" for part, value in ms.items())
    return f"CPU ms a rollout: {sum(ms.values()):.0f}, {parts}"


async def level(runner: HarborRunner, task: Task, concurrency: int) -> None:
    count = max(2 * concurrency, 8)
    pids = await worker_pids(runner)
    cpu_before = parts_cpu_s(pids)
    started = time.perf_counter()
    rollouts = await asyncio.gather(
        *(runner.run(request_for(task, f"n{concurrency}-{number}")) for number in range(count))
    )
    seconds = time.perf_counter() - started
    cpu = in_parts(cpu_before, parts_cpu_s(pids), count)
    assert {rollout.outcome for rollout in rollouts} == {Outcome.COMPLETED}, [r.failure for r in rollouts]
    memory = [rss_mb(pid) for pid in pids]
    files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]
    print(
        f"{concurrency:3} at once: {count / seconds:5.2f} rollouts/s, workers {sum(memory):.0f} MB"
        f" {[round(m) for m in memory]}, open files {files}, threads {threads}; {cpu}",
        flush=True,
    )


async def concurrent(levels: list[int], workers: int) -> None:
    look = [("terminal", {"command": f"echo {n}; ls"}) for n in range(2)]
    search = [("code_search", {"query": name}) for name in ("gamma", "Alpha beta")]
    agent = AgentChoice(options={"tools": ("terminal", "code_search", "localization_finish")})
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(Path(directory) / "tasks")
        for concurrency in levels:
            settings = RunnerSettings(
                trials_directory=Path(directory) / "trials",
                agent=agent,
                workers=workers,
                concurrency=concurrency,
            )
            async with (
                policy(*look, *search, HAND_IN) as proxy,
                HarborRunner(sessions=proxy, settings=settings) as runner,
            ):
                await asyncio.gather(*(runner.run(request_for(task, f"warm{n}")) for n in range(2 * workers)))
                await level(runner, task, concurrency)
    files = len(os.listdir("/proc/self/fd"))
    print(f"driver: {rss_mb(os.getpid()):.0f} MB, {files} files, {threading.active_count()} threads")


def requests_of(tasks: Sequence[Task], settings: LoopSettings, *, step: int) -> list[RolloutRequest]:
    """Return the rollouts of a synchronous step."""
    numbers = range((step - 1) * settings.tasks_per_step, step * settings.tasks_per_step)
    return [
        request
        for number in numbers
        for request in group_requests(
            task_of_group(tasks, number, seed=settings.seed), number, settings=settings
        )
    ]


async def demo(steps: int) -> None:
    recipe = load_recipe(_DEMO)
    tasks = load_tasks(recipe.tasks.train)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        async with open_stack(recipe, model=recipe.policy.model, trials_directory=Path(directory)) as stack:
            warm = requests_of(tasks, recipe.loop, step=steps + 1)[: 2 * recipe.rollouts.workers]
            await asyncio.gather(*map(stack.runner.run, warm))
            print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
            pids = await worker_pids(stack.runner)
            for step in range(1, steps + 1):
                requests = requests_of(tasks, recipe.loop, step=step)
                before, started = parts_cpu_s(pids), time.perf_counter()
                rollouts = await asyncio.gather(*map(stack.runner.run, requests))
                seconds = time.perf_counter() - started
                rewards = [rollout.reward.value for rollout in rollouts if rollout.reward is not None]
                cpu = in_parts(before, parts_cpu_s(pids), len(rollouts))
                print(
                    f"step {step}: {seconds:.2f} s, reward {statistics.mean(rewards):.3f}; {cpu}", flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("overhead").add_argument("--pairs", type=int, default=40)
    second = commands.add_parser("concurrent")
    second.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32, 64])
    second.add_argument("--workers", type=int, default=2)
    commands.add_parser("demo").add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args()
    prepare()
    if chosen.command == "overhead":
        asyncio.run(overhead(chosen.pairs))
    elif chosen.command == "demo":
        asyncio.run(demo(chosen.steps))
    else:
        asyncio.run(concurrent(chosen.levels, chosen.workers))


if __name__ == "__main__":
    main()
