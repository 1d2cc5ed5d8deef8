"""A run's samples and rollouts as files for other programs.

Samples are a table with one row for each, exactly as it was trained: the batch of a step is built again from
its rollouts by the recipe's own rules, so the rows add up to the step's ledger; a step whose rows do not is
refused. Rollouts are written one by one in the formats of `formats`.
"""

import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from pilotage.algorithms import build_batch, mask_stale
from pilotage.errors import ConfigError
from pilotage.loops import LoopSettings, RunDirectory, read_rollout
from pilotage.ops.formats import atif_trajectory, fine_tuning_rows, rollout_details
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.types import Rollout, Sample


def trained_rows(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the rows of every finished step, oldest first.

    Raises:
        ConfigError: the files of a step's rollouts do not add up to its record.
    """
    settings = LoopSettings.model_validate(run.config().get("loop", {}))
    trained = run.trained_groups()
    for record in run.metrics():
        if "ledger/trained_tokens" not in record:
            continue  # an evaluation only
        step = int(record["step"])
        if step not in trained:
            raise ConfigError(f"{run.groups_path} does not say which groups step {step} trained; restore it")
        files = [file for group in trained[step].groups for file in run.files_of_group(group)]
        rollouts = {rollout.id: rollout for rollout in map(read_rollout, files)}
        batch = mask_stale(
            build_batch(list(rollouts.values()), settings.batch_rules()),
            trainer_version=trained[step].trainer_version,
            max_lag=settings.max_lag,
        )
        if batch.ledger.trained_tokens != record["ledger/trained_tokens"]:
            raise ConfigError(
                f"{run.path}: step {step} trained {record['ledger/trained_tokens']:.0f} tokens, and its"
                f" rollout files have {batch.ledger.trained_tokens}; restore those of"
                f" {', '.join(trained[step].groups)}"
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

    schema = pa.schema(
        [("step", pa.int32())]
        + [(name, pa.string()) for name in ("rollout", "group", "task", "outcome")]
        + [("reward", pa.float64()), ("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))]
        + [(name, pa.list_(pa.float32())) for name in ("sampler_logprobs", "advantages")]
        + [("weights_versions", pa.list_(pa.int32()))]
    )
    steps = (list(rows) for _, rows in groupby(trained_rows(run), itemgetter("step")))
    return _write_parquet(path, schema, steps)


def write_fine_tuning(run: RunDirectory, path: Path, *, min_reward: float) -> int:
    """Write rows for supervised fine-tuning, of the training rollouts that earned enough; return how many.

    Evaluations are left out: what is held out stays so.

    Raises:
        ConfigError: `path` exists, no rollout earned `min_reward`, or a file cannot be read.
    """
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [
            ("rollout", pa.string()),
            ("task", pa.string()),
            ("reward", pa.float64()),
            ("input_ids", pa.list_(pa.int32())),
            ("assistant_masks", pa.list_(pa.int8())),
            ("messages", pa.list_(message)),
        ]
    )
    renderer = _renderer(run)
    files = [file for file in run.rollout_files() if file.parent.name.startswith("step-")]
    good = _rollouts(files, min_reward=min_reward)
    num_rows = _write_parquet(path, schema, (list(fine_tuning_rows(rollout, renderer)) for rollout in good))
    if not num_rows:
        path.unlink()
        raise ConfigError(f"no training rollout of {run.path} has a reward of {min_reward:g}; lower it")
    return num_rows


def _write_parquet(path: Path, schema: Any, tables: Iterable[list[dict[str, Any]]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _require_new(path)
    partial = path.with_name(f".{path.name}.partial")
    num_rows = 0
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for rows in tables:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                num_rows += len(rows)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


def write_atif(run: RunDirectory, directory: Path, *, min_reward: float | None = None) -> int:
    """Write `ID.json` in Harbor's trajectory format for each rollout with a turn; return how many.

    Raises:
        ConfigError: `directory` exists, or a file or the tokenizer cannot be read.
    """
    _require_new(directory)
    renderer, config = _renderer(run), run.config()
    agent = str(config.get("rollouts", {}).get("agent", "unknown"))
    model = Path(str(config["policy"]["model"])).name
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    count = 0
    for rollout in _rollouts(run.rollout_files(), min_reward=min_reward):
        document = atif_trajectory(rollout, renderer, agent=agent, model=model)
        (partial / f"{rollout.id}.json").write_bytes(orjson.dumps(document))
        count += 1
    partial.rename(directory)
    return count


def write_details(run: RunDirectory, path: Path, *, min_reward: float | None = None) -> int:
    """Write a JSON line with Harbor's rollout details for each rollout with a turn; return how many.

    Raises:
        ConfigError: `path` exists, or a file cannot be read.
    """
    _require_new(path)
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            for rollout in _rollouts(run.rollout_files(), min_reward=min_reward):
                line = {
                    "rollout": rollout.id,
                    "task": rollout.task_id,
                    "outcome": rollout.outcome,
                    "reward": None if rollout.reward is None else rollout.reward.value,
                    "rollout_details": rollout_details(rollout.trajectory),
                }
                file.write(orjson.dumps(line) + b"\n")
                count += 1
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _require_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already; give another --out, or remove it")


def _renderer(run: RunDirectory) -> TemplateRenderer:
    policy = run.config().get("policy", {})
    if "model" not in policy:
        raise ConfigError(f"{run.config_path} names no policy.model; its ids cannot be read as text")
    return load_renderer(Path(policy["model"]), enable_thinking=policy.get("enable_thinking"))


def _rollouts(files: Iterable[Path], *, min_reward: float | None) -> Iterator[Rollout]:
    """Yield rollouts that have a turn, and, where it is asked for, at least that reward."""
    for file in files:
        rollout = read_rollout(file)
        reward = None if rollout.reward is None else rollout.reward.value
        is_good = min_reward is None or (reward is not None and reward >= min_reward)
        if rollout.trajectory.turns and is_good:
            yield rollout
