"""Limits of trials: pools of slots for their phases, and how fast they start; on real trials."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import ScriptedSampler, WordRenderer
from tests.rollouts.rig import HAND_IN, Turn, policy, request_for, script_of, write_task
from tests.rollouts.slow_environment import BUILD_S, SlowEnvironment

from pilotage.interfaces import SessionHost
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.rollouts.limits import PoolSlots, StartLimit, TrialLimits
from pilotage.rollouts.report import TrialPhase
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice
from pilotage.types import Outcome, Rollout, SessionAccess, SessionRecord, SessionSpec, Task

WORK_S = 0.5
TEST_S = 2.0
WORK: Turn = (
    "terminal",
    {"command": f"date +%s.%N > /logs/agent/times; sleep {WORK_S}; date +%s.%N >> /logs/agent/times"},
)
SLOW_TEST = f"""#!/bin/bash
date +%s.%N > /logs/verifier/times
sleep {TEST_S}
date +%s.%N >> /logs/verifier/times
echo 1 > /logs/verifier/reward.txt
"""
type Span = tuple[float, float]


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def spans(directory: Path, of: str) -> list[Span]:
    """When each trial's agent, or verifier, was at work; in the order of the trials' names."""
    files = sorted(directory.glob(f"*/{of}/times"))
    return [(float(began), float(ended)) for began, ended in (file.read_text().split() for file in files)]


def settings_for(root: Path, limits: TrialLimits, **fields: object) -> RunnerSettings:
    chosen: dict[str, object] = {
        "trials_directory": root / "trials",
        "agent": AgentChoice(options={"tools": ("terminal", "localization_finish")}),
        "limits": limits,
        "keep_trials": True,
        "workers": 0,
    }
    return RunnerSettings(**(chosen | fields))  # pyright: ignore[reportArgumentType]


async def run_many(task: Task, settings: RunnerSettings, count: int, *turns: Turn) -> Sequence[Rollout]:
    async with policy(*turns) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        requests = [request_for(task, f"rollout-{index}") for index in range(count)]
        rollouts = await asyncio.gather(*map(runner.run, requests))
    assert [rollout.failure for rollout in rollouts] == [None] * count
    return rollouts


async def file_of(settings: RunnerSettings, pattern: str) -> Path:
    """Wait until a trial has written a file."""
    async with asyncio.timeout(120):
        while not (found := list(settings.trials_directory.glob(pattern))):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.02)
    return found[0]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "tasks", test_sh=SLOW_TEST)


@pytest.mark.agents
@pytest.mark.parametrize("workers", [0, 2])
async def test_a_verifier_that_takes_long_holds_no_agents_slot(
    task: Task, tmp_path: Path, workers: int
) -> None:
    settings = settings_for(tmp_path, TrialLimits(agent_slots=1), workers=workers)

    rollouts = await run_many(task, settings, 3, WORK, HAND_IN)

    agents, verifiers = (
        spans(settings.trials_directory, "agent"),
        spans(settings.trials_directory, "verifier"),
    )
    assert not any(overlap(one, other) for one, other in itertools.combinations(agents, 2))
    assert any(overlap(verifier, agent) for verifier in verifiers for agent in agents)
    waits = [rollout.timings_s["waiting"] for rollout in rollouts]
    if workers == 0:  # all start together; workers start when they are up
        assert sorted(wait > WORK_S for wait in waits) == [False, True, True]
    assert max(waits) > WORK_S / 2


@pytest.mark.agents
async def test_verifiers_have_slots_of_their_own(task: Task, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, TrialLimits(verifier_slots=1))

    await run_many(task, settings, 3, WORK, HAND_IN)

    agents, verifiers = (
        spans(settings.trials_directory, "agent"),
        spans(settings.trials_directory, "verifier"),
    )
    assert not any(overlap(one, other) for one, other in itertools.combinations(verifiers, 2))
    assert any(overlap(one, other) for one, other in itertools.combinations(agents, 2))


@pytest.mark.agents
async def test_builds_come_one_after_another_while_an_agent_works(task: Task, tmp_path: Path) -> None:
    environment = EnvironmentChoice(name="tests.rollouts.slow_environment:SlowEnvironment")
    settings = settings_for(tmp_path, TrialLimits(setup_slots=1), environment=environment)
    SlowEnvironment.builds.clear()

    await run_many(task, settings, 3, WORK, HAND_IN)

    builds = [(began, ended) for _, began, ended in SlowEnvironment.builds]
    assert len(builds) == 3
    assert all(ended - began >= BUILD_S for began, ended in builds)
    assert not any(overlap(one, other) for one, other in itertools.combinations(builds, 2))
    agents = spans(settings.trials_directory, "agent")
    assert any(overlap(build, agent) for build in builds for agent in agents)


@pytest.mark.agents
async def test_a_trial_that_waits_for_a_slot_has_all_its_time_left(task: Task, tmp_path: Path) -> None:
    # Eight in a row wait for 14 s and more; each by itself takes about 5 s.
    deadlines = Deadlines(trial_s=12.0)
    settings = settings_for(tmp_path, TrialLimits(agent_slots=1), deadlines=deadlines)

    rollouts = await run_many(task, settings, 8, ("terminal", {"command": "sleep 2"}), HAND_IN)

    assert max(rollout.timings_s["total"] for rollout in rollouts) > deadlines.trial_s


@pytest.mark.agents
@pytest.mark.slow
async def test_slots_of_trials_whose_worker_died_come_back(task: Task, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, TrialLimits(agent_slots=1), workers=1)
    stay: Turn = ("terminal", {"command": "sleep 60"})
    renderer = WordRenderer()
    sampler = ScriptedSampler(script=script_of(renderer, [stay]))
    proxy = ChatCompletionsProxy(sampler, renderer)
    async with serve(proxy), HarborRunner(sessions=proxy, settings=settings) as runner:
        lost = asyncio.create_task(runner.run(request_for(task, "lost")))
        await asked(sampler, 1)
        (worker,) = children()
        os.kill(worker, signal.SIGKILL)
        await asked(sampler, 2)  # the second attempt got the only slot
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)


async def asked(sampler: ScriptedSampler, count: int) -> None:
    """Wait until a policy was asked so often; an agent that asks has its slot."""
    async with asyncio.timeout(120):
        while sampler.num_started < count:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)


def children() -> list[int]:
    """Rollout workers of this process."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        command = stat.with_name("cmdline").read_bytes()
        if int(fields[1]) == os.getpid() and b"pilotage.rollouts.worker" in command:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.agents
@pytest.mark.slow
async def test_a_rollout_that_is_cancelled_while_it_waits_takes_no_slot(task: Task, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, TrialLimits(agent_slots=1), workers=1)
    async with policy(WORK, HAND_IN) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        running = [asyncio.create_task(runner.run(request_for(task, f"rollout-{n}"))) for n in range(3)]
        at_work = int((await file_of(settings, "*/agent/times")).parts[-3].split("-")[1])
        waiting, last = [task for number, task in enumerate(running) if number != at_work]
        waiting.cancel()
        assert (await running[at_work]).outcome == Outcome.COMPLETED
        assert (await last).outcome == Outcome.COMPLETED
        with pytest.raises(asyncio.CancelledError):
            await waiting


class Clocked:
    """Sessions of a proxy, with the loop's time at which each was opened."""

    def __init__(self, sessions: SessionHost) -> None:
        self.opened_at: list[float] = []
        self._sessions = sessions

    def open(self, spec: SessionSpec) -> SessionAccess:
        self.opened_at.append(asyncio.get_running_loop().time())
        return self._sessions.open(spec)

    def prolong(self, access: SessionAccess, seconds: float) -> None:
        self._sessions.prolong(access, seconds)

    async def close(self, access: SessionAccess) -> SessionRecord:
        return await self._sessions.close(access)


@pytest.mark.agents
async def test_no_more_trials_start_in_a_second_than_the_limit_allows(task: Task, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, TrialLimits(starts_per_s=4))
    async with policy(HAND_IN) as proxy:
        clocked = Clocked(proxy)
        async with HarborRunner(sessions=clocked, settings=settings) as runner:
            await asyncio.gather(*(runner.run(request_for(task, f"rollout-{n}")) for n in range(6)))

    assert len(clocked.opened_at) == 6
    # The loop may wake a sleeper within its clock's resolution.
    assert all(later - earlier >= 0.2499 for earlier, later in itertools.pairwise(clocked.opened_at))
    assert clocked.opened_at[-1] - clocked.opened_at[0] < 5 * 0.25 + 2


async def test_starts_are_not_limited_unless_the_recipe_says_so() -> None:
    limit, loop = StartLimit(None), asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(limit.wait() for _ in range(1000)))
    assert loop.time() - started < 0.5


async def test_a_loop_that_stalls_bunches_no_starts() -> None:
    limit, loop = StartLimit(20), asyncio.get_running_loop()
    started_at: list[float] = []

    async def start() -> None:
        await limit.wait()
        started_at.append(loop.time())

    starts = [asyncio.create_task(start()) for _ in range(4)]
    await asyncio.sleep(0.01)
    time.sleep(0.2)  # noqa: ASYNC251  # as an import does
    await asyncio.gather(*starts)
    assert all(later - earlier >= 0.0499 for earlier, later in itertools.pairwise(started_at))


async def test_a_pause_saves_up_no_starts() -> None:
    limit, loop = StartLimit(20), asyncio.get_running_loop()
    await limit.wait()
    await asyncio.sleep(0.3)
    started = loop.time()
    for _ in range(3):
        await limit.wait()
    assert loop.time() - started > 0.09  # the first at once, the others 0.05 s apart


@given(
    sizes=st.tuples(*[st.none() | st.integers(1, 3)] * 3),
    plans=st.lists(st.lists(st.sampled_from(TrialPhase), max_size=5), max_size=6),
)
def test_no_pool_is_overdrawn_and_all_slots_come_back(
    sizes: tuple[int | None, int | None, int | None], plans: list[list[TrialPhase]]
) -> None:
    limit = dict(zip((TrialPhase.ENVIRONMENT, TrialPhase.AGENT, TrialPhase.VERIFIER), sizes, strict=True))
    waits: list[float] = []
    inside = dict.fromkeys(TrialPhase, 0)

    async def trial(plan: list[TrialPhase], slots: PoolSlots) -> None:
        for phase in plan:
            await slots.enter(phase)
            inside[phase] += 1
            assert inside[phase] <= (limit[phase] or len(plans))
            await asyncio.sleep(0)
            inside[phase] -= 1
        await slots.leave()

    async def run() -> None:
        limits = TrialLimits(setup_slots=sizes[0], agent_slots=sizes[1], verifier_slots=sizes[2])
        pools = limits.pools()
        async with asyncio.timeout(5):
            await asyncio.gather(*(trial(plan, PoolSlots(pools, waits.append)) for plan in plans))
        for phase, pool in pools.items():
            assert [pool.locked(), await free_slots(pool)] == [False, limit[phase]]

    asyncio.run(run())
    assert len(waits) == sum(limit[phase] is not None for plan in plans for phase in plan)


async def free_slots(pool: asyncio.Semaphore) -> int:
    count = 0
    while not pool.locked():
        await pool.acquire()
        count += 1
    return count
