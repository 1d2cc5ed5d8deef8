"""The training loop with rollouts and training at the same time, on a virtual clock."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.loops.rig import TOKENS_PER_ROLLOUT
from tests.loops.simulated import Simulation
from tests.loops.virtual_time import DeadlockError, run_simulated

from pilotage.errors import TrainerError
from pilotage.loops import LoopSettings, RunDirectory, Stragglers

SETTINGS = LoopSettings(num_steps=8, tasks_per_step=2, group_size=2, checkpoint_every_steps=3)


def with_lag(max_lag: int, **more: object) -> LoopSettings:
    return SETTINGS.model_copy(update={"max_lag": max_lag, **more})


def steady(_rng: np.random.Generator) -> float:
    return 10.0


def heavy_tailed(rng: np.random.Generator) -> float:
    return float(rng.lognormal(2.0, 1.0))


def trained_groups(simulation: Simulation) -> Counter[str]:
    """How many of its rollouts each group was trained with."""
    names = {name for _, name in simulation.trainer.trained}
    return Counter(name.rpartition("-")[0] for name in names)


def test_the_clock_jumps_and_a_wait_for_ever_is_an_error() -> None:
    async def a_day() -> str:
        await asyncio.sleep(86_400)
        return "over"

    assert run_simulated(a_day()) == ("over", 86_400)
    with pytest.raises(DeadlockError):
        run_simulated(asyncio.Event().wait())


def test_without_lag_a_step_takes_its_rollouts_and_then_its_training(tmp_path: Path) -> None:
    simulation = Simulation(settings=with_lag(0), latency=steady, train_s=5)
    records, took_s = run_simulated(simulation.run(tmp_path / "run"))
    assert took_s == 8 * (10 + 5)
    assert [record["lag/max_versions"] for record in records[1:]] == [0] * 8
    assert [record["time/step_s"] for record in records[1:]] == [15] * 8


def test_with_lag_rollouts_go_on_while_the_trainer_works(tmp_path: Path) -> None:
    simulation = Simulation(settings=with_lag(1), latency=steady, train_s=5)
    records, took_s = run_simulated(simulation.run(tmp_path / "run"))
    # Two steps' rollouts at once: they take 10 s, in which both steps before are trained; steps end at
    # 15, 20, 30, 35, 45, 50, 60 and 65 s.
    assert took_s == 65
    assert max(record["lag/max_versions"] for record in records[1:]) == 1
    assert sum(record["ledger/trained_tokens"] for record in records[1:]) == 8 * 4 * TOKENS_PER_ROLLOUT
    assert set(trained_groups(simulation).values()) == {2}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**20),
    max_lag=st.integers(0, 3),
    stragglers=st.sampled_from(Stragglers),
    refill=st.booleans(),
    concurrency=st.integers(1, 12),
    train_s=st.sampled_from([0.0, 3.0, 60.0]),
)
def test_whatever_takes_how_long_every_group_is_trained_once_and_every_token_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    max_lag: int,
    stragglers: Stragglers,
    refill: bool,
    concurrency: int,
    train_s: float,
) -> None:
    chosen = with_lag(max_lag, seed=seed, stragglers=stragglers, refill=refill, num_steps=5)
    simulation = Simulation(
        settings=chosen, latency=heavy_tailed, train_s=train_s, publish_s=1, concurrency=concurrency
    )
    records, _ = run_simulated(simulation.run(tmp_path_factory.mktemp("run") / "run"))
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5]
    asked = [request.id for request in simulation.runner.requests]
    assert len(asked) == len(set(asked)) == 5 * 4
    trained = Counter(simulation.trainer.trained)
    assert set(trained.values()) <= {1, 2}  # two branches each
    for record in records[1:]:
        assert record["ledger/sampled_tokens"] == 4 * TOKENS_PER_ROLLOUT
        assert record["lag/max_versions"] <= max_lag
        stale = record.get("ledger/masked_tokens/stale", 0)
        assert stale == 0 or stragglers is Stragglers.MASK
        assert record["ledger/trained_tokens"] + stale == 4 * TOKENS_PER_ROLLOUT
    assert simulation.runner.most_at_once <= concurrency


def test_tokens_that_weights_too_far_back_sampled_are_masked(tmp_path: Path) -> None:
    def one_straggles(rng: np.random.Generator) -> float:
        return 1000.0 if rng.random() < 0.05 else 10.0

    chosen = with_lag(1, stragglers=Stragglers.MASK, num_steps=30)
    simulation = Simulation(settings=chosen, latency=one_straggles, train_s=5)
    records, took_s = run_simulated(simulation.run(tmp_path / "run"))
    waiting = Simulation(settings=with_lag(1, num_steps=30), latency=one_straggles, train_s=5)
    _, waiting_took_s = run_simulated(waiting.run(tmp_path / "waiting"))
    assert took_s < waiting_took_s
    assert max(record["lag/max_versions"] for record in records[1:]) == 1
    assert sum(record.get("ledger/masked_tokens/stale", 0) for record in records[1:]) > 0
    for record in records[1:]:
        trained = record["ledger/trained_tokens"] + record["ledger/masked_tokens"]
        assert trained == record["ledger/sampled_tokens"] == 4 * TOKENS_PER_ROLLOUT


def test_a_group_without_spread_is_replaced_where_the_recipe_says_so(tmp_path: Path) -> None:
    simulation = Simulation(settings=with_lag(0, refill=True), latency=steady, train_s=5, spread=0.0)
    with pytest.raises(TrainerError, match=r"^no gradient in 10 groups: "):
        run_simulated(simulation.run(tmp_path / "run"))
    assert simulation.trainer.num_steps == 0


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_run_that_is_stopped_at_any_second_and_taken_up_again_trains_every_group_once(
    tmp_path: Path, max_lag: int
) -> None:
    chosen = with_lag(max_lag)
    whole = Simulation(settings=chosen, latency=heavy_tailed, train_s=5)
    _, took_s = run_simulated(whole.run(tmp_path / "whole"))
    for part in range(1, 10):
        path = tmp_path / f"part-{part}"
        stopped = Simulation(settings=chosen, latency=heavy_tailed, train_s=5)

        async def stop(
            simulation: Simulation = stopped, path: Path = path, after_s: float = took_s * part / 10
        ) -> None:
            task = asyncio.create_task(simulation.run(path))
            await asyncio.sleep(after_s)
            task.cancel()
            await asyncio.wait([task])

        run_simulated(stop())
        kept = {file.name.partition(".")[0] for file in RunDirectory(path).rollout_files()}
        resumed = Simulation(settings=chosen, latency=heavy_tailed, train_s=5)
        records, _ = run_simulated(resumed.run(path, resume=True))
        assert [record["step"] for record in records] == list(range(9))
        asked = {request.id for request in resumed.runner.requests}
        assert not asked & kept  # what had ended is not run again
        assert max(record.get("lag/max_versions", 0) for record in records) <= max_lag
        trained = [name for _, name in stopped.trainer.trained + resumed.trainer.trained]
        assert set(Counter(trained).values()) == {2}
        assert set(trained) == {name for _, name in whole.trainer.trained}


def test_a_failure_while_rollouts_are_under_way_ends_the_run_and_leaves_none_of_them(tmp_path: Path) -> None:
    simulation = Simulation(settings=with_lag(2), latency=steady, train_s=5)

    async def fail() -> int:
        async def break_the_trainer() -> None:
            await asyncio.sleep(12)
            simulation.trainer.fails_in_step = 1

        breaking = asyncio.create_task(break_the_trainer())
        with pytest.raises(TrainerError, match="went away"):
            await simulation.run(tmp_path / "run")
        await breaking
        return len(asyncio.all_tasks())

    left, _ = run_simulated(fail())
    assert left == 1
