"""A run's samples as a table: one row for each sample, exactly as it was trained.

The batch of a step is built again from its rollouts by the recipe's own rules, so the rows add up to the
step's ledger; a step whose rows do not is refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pilotage.algorithms import build_batch
from pilotage.errors import ConfigError
from pilotage.loops import LoopSettings, RunDirectory, read_rollout
from pilotage.types import Rollout, Sample


def trained_rows(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the rows of every finished step, oldest first.

    Raises:
        ConfigError: the files of a step's rollouts do not add up to its record.
    """
    settings = LoopSettings.model_validate(run.config().get("loop", {}))
    for record in run.metrics():
        if "ledger/trained_tokens" not in record:
            continue  # an evaluation only
        step = int(record["step"])
        files = sorted((run.path / "rollouts" / f"step-{step:04d}").glob("*.json.gz"))
        rollouts = {rollout.id: rollout for rollout in map(read_rollout, files)}
        batch = build_batch(
            list(rollouts.values()), settings.outcome_rules(), scale_by_std=settings.scale_advantages_by_std
        )
        if batch.ledger.trained_tokens != record["ledger/trained_tokens"]:
            raise ConfigError(
                f"{run.path}: step {step} trained {record['ledger/trained_tokens']:.0f} tokens, and its"
                f" rollout files have {batch.ledger.trained_tokens}; restore rollouts/step-{step:04d}"
            )
        for sample in batch.samples:
            yield _row(step, sample, rollouts[sample.sequence_id])


def _row(step: int, sample: Sample, rollout: Rollout) -> dict[str, Any]:
    assert rollout.reward is not None  # else it would not be trained
    return {
        "step": step,
        "rollout": rollout.id,
        "group": sample.group_id,
        "task": rollout.task_id,
        "outcome": str(rollout.outcome),
        "reward": rollout.reward.value,
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "sampler_logprobs": sample.sampler_logprobs,
        "advantages": sample.advantages,
        "weights_versions": sample.weights_versions,
    }


def write_samples(run: RunDirectory, path: Path) -> int:
    """Write the rows as one parquet file, which `datasets` reads; returns how many. One step is in memory.

    Raises:
        ConfigError: `path` exists, or as `trained_rows`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.exists():
        raise ConfigError(f"{path} exists already; give another --out, or remove it")
    schema = pa.schema(
        [("step", pa.int32())]
        + [(name, pa.string()) for name in ("rollout", "group", "task", "outcome")]
        + [("reward", pa.float64()), ("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))]
        + [(name, pa.list_(pa.float32())) for name in ("sampler_logprobs", "advantages")]
        + [("weights_versions", pa.list_(pa.int32()))]
    )
    partial = path.with_name(f".{path.name}.partial")
    num_rows = 0
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            rows: list[dict[str, Any]] = []
            for row in trained_rows(run):
                if rows and rows[-1]["step"] != row["step"]:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
                rows.append(row)
                num_rows += 1
            writer.write_table(pa.Table.from_pylist(rows, schema))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows
