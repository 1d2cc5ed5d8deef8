"""Rollouts on two hosts that Ray knows, each in a network of its own; one loses its power in the middle."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.fakes import ScriptedSampler, WordRenderer
from tests.rollouts.ray_hosts import ADDRESS, HEAD, RayHosts, can_be_made
from tests.rollouts.rig import HAND_IN, Turn, request_for, script_of, write_task

from pilotage.recipes.config import PolicySettings, Recipe, RolloutSettings, TaskSettings
from pilotage.recipes.stack import open_runner
from pilotage.rollouts.ray_cluster import open_ray
from pilotage.types import Completion, Outcome, Rollout, SamplingParams, TokenIds


@dataclass
class HeldSampler(ScriptedSampler):
    """Holds every rollout at its second turn until `may_go_on` is set."""

    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    num_held: int = 0

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        if turn_index:
            self.num_held += 1
            await self.may_go_on.wait()
        return await super().sample(prompt_ids, params, session_id=session_id, turn_index=turn_index)

    async def holds(self, count: int) -> None:
        async with asyncio.timeout(120):
            while self.num_held < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_be_made(), reason="may make no network, or has no iproute2 and util-linux"),
]
NUM_AT_ONCE = 6
OURS, THEIRS = 2, 3
"""Hosts: one that stays, and one that is switched off."""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHosts]:
    sockets = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    hosts = RayHosts(tmp_path, sockets)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, hosts.environment[name])
    monkeypatch.chdir(tmp_path)
    try:
        hosts.start_head()
        for number in (OURS, THEIRS):
            hosts.switch_on(number)
        yield hosts
    finally:
        hosts.close()
        shutil.rmtree(sockets)


async def test_a_host_that_loses_its_power_costs_an_attempt_and_comes_back(
    hosts: RayHosts, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "tasks")
    renderer = WordRenderer()
    turns: list[Turn] = [("terminal", {"command": "hostname"}), HAND_IN]
    sampler = HeldSampler(script=script_of(renderer, turns))
    recipe = Recipe(
        name="hosts",
        policy=PolicySettings(model=tmp_path),
        tasks=TaskSettings(train=(tmp_path / "tasks",)),
        rollouts=RolloutSettings(concurrency=NUM_AT_ONCE, workers=1, ray_address=ADDRESS),
    )
    async with open_ray(ADDRESS) as cluster, asyncio.timeout(240):
        assert cluster.address == HEAD
        while len(await cluster.hosts()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    async with open_runner(recipe, sampler, renderer, tmp_path / "trials") as runner:
        assert runner._workers is not None
        pool = runner._workers._pool
        first = [asyncio.create_task(runner.run(request_for(task, f"r{n}"))) for n in range(12)]
        await sampler.holds(6)
        loads = [len(worker.pending) for worker in await pool.workers()]
        hosts.switch_off(THEIRS)
        await sampler.holds(6 + 3)
        num_left = len(await pool.workers())
        sampler.may_go_on.set()
        rollouts = list(await asyncio.gather(*first))

        hosts.switch_on(THEIRS)
        async with asyncio.timeout(180):
            while len(await pool.workers()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        sampler.may_go_on.clear()
        second = [asyncio.create_task(runner.run(request_for(task, f"later{n}"))) for n in range(6)]
        await sampler.holds(9 + 6 + 6)
        later_loads = [len(worker.pending) for worker in await pool.workers()]
        sampler.may_go_on.set()
        later = list(await asyncio.gather(*second))

    assert (loads, num_left, later_loads) == ([3, 3], 1, [3, 3])
    assert [rollout.id for rollout in rollouts] == [f"r{n}" for n in range(12)]
    assert {rollout.outcome for rollout in [*rollouts, *later]} == {Outcome.COMPLETED}
    assert sorted(rollout.attempt for rollout in rollouts) == [0] * 9 + [1] * 3
    assert {rollout.attempt for rollout in later} == {0}
    assert_every_token_is_accounted_for(sampler, [*rollouts, *later])
    assert list((tmp_path / "trials").iterdir()) == []
    for number in (OURS, THEIRS):
        assert [command for command in hosts.processes(number) if "hosted_worker" in command] == []


def assert_every_token_is_accounted_for(sampler: ScriptedSampler, rollouts: list[Rollout]) -> None:
    """What was sampled is in a trajectory, or in what an attempt that was lost cost."""
    kept = sum(rollout.trajectory.sampled_tokens for rollout in rollouts)
    discarded = sum(sum(rollout.discarded_tokens.values()) for rollout in rollouts)
    assert kept > 0
    assert kept + discarded == sum(
        call.completion_ids.size for call in sampler.calls if call.completion_ids is not None
    )
