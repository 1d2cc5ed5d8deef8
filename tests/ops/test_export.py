"""Rows of an export are the samples that a run was trained on."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loops.rig import Rig
from tests.loops.simulated import Simulation
from tests.loops.virtual_time import run_simulated

from pilotage.cli import main
from pilotage.errors import ConfigError
from pilotage.loops import LoopSettings, RunDirectory, Stragglers
from pilotage.ops.export import trained_rows, write_samples

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed, see the extra `data`")

SETTINGS = LoopSettings(num_steps=3, tasks_per_step=2, group_size=3)


def exported(tmp_path: Path) -> tuple[RunDirectory, list[dict[str, Any]]]:
    failing = frozenset({"step-0001-00-00", "step-0002-01-00", "step-0002-01-01"})
    asyncio.run(Rig(settings=SETTINGS, failing=failing).run(tmp_path / "run"))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "x.parquet")]) == 0
    return RunDirectory(tmp_path / "run"), pq.read_table(tmp_path / "x.parquet").to_pylist()


def test_trained_tokens_of_each_step_are_those_of_its_ledger(tmp_path: Path) -> None:
    run, rows = exported(tmp_path)
    trained = {
        int(record["step"]): record["ledger/trained_tokens"] for record in run.metrics() if record["step"]
    }
    assert trained == {
        step: sum(sum(row["loss_mask"]) for row in rows if row["step"] == step) for step in trained
    }
    # In step 2 the group of two failures has one reward, and gives nothing.
    assert trained == {1: 25, 2: 15, 3: 30}
    assert not [row for row in rows if row["group"] == "step-0002-01"]


def test_a_row_has_its_rollout_s_arrays_and_its_advantage_is_reward_minus_mean(tmp_path: Path) -> None:
    _, rows = exported(tmp_path)
    group = [row for row in rows if row["group"] == "step-0003-00"]
    assert [row["token_ids"] for row in group] == [[1, 2, 3, 4, 5], [1, 2, 6, 7]] * 3
    assert [row["loss_mask"] for row in group[:2]] == [[False] * 2 + [True] * 3, [False] * 2 + [True] * 2]
    mean = sum({row["rollout"]: row["reward"] for row in group}.values()) / 3
    for row in group:
        sampled = len(row["token_ids"]) - 2
        assert row["advantages"] == pytest.approx([0, 0] + [row["reward"] - mean] * sampled, abs=1e-6)
        assert row["sampler_logprobs"] == pytest.approx([0, 0] + [-0.6931472] * sampled)
        assert row["weights_versions"] == [-1, -1] + [3] * sampled
        assert row["outcome"] == "completed"


def test_of_a_run_with_lag_each_step_has_the_groups_and_the_tokens_that_it_trained(tmp_path: Path) -> None:
    def one_straggles(rng: np.random.Generator) -> float:
        return 1000.0 if rng.random() < 0.1 else 10.0

    settings = LoopSettings(
        num_steps=12, tasks_per_step=2, group_size=2, max_lag=1, stragglers=Stragglers.MASK
    )
    simulation = Simulation(settings=settings, latency=one_straggles, train_s=5)
    records, _ = run_simulated(simulation.run(tmp_path / "run"))
    assert sum(record.get("ledger/masked_tokens/stale", 0) for record in records) > 0
    rows = list(trained_rows(RunDirectory(tmp_path / "run")))  # refuses steps whose ledger differs
    assert [(row["step"], row["rollout"]) for row in rows] == simulation.trainer.trained
    assert [
        row for row in rows if row["group"][:9] != f"step-{row['step']:04d}"
    ]  # groups overtook each other


def test_rollout_files_that_do_not_add_up_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    run, _ = exported(tmp_path)
    (run.path / "rollouts" / "step-0003" / "step-0003-00-01.json.gz").unlink()
    with pytest.raises(
        ConfigError,
        match=r"step 3 trained 30 tokens, and its rollout files have \d+; restore those of step-",
    ):
        write_samples(run, tmp_path / "y.parquet")
    assert [path.name for path in tmp_path.iterdir() if "y.parquet" in path.name] == []
    with pytest.raises(ConfigError, match="exists already"):
        write_samples(run, tmp_path / "x.parquet")
