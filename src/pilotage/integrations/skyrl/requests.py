"""From what SkyRL's trainer asks to requests for rollouts. What cannot be honoured is refused."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pilotage.datasets import load_tasks
from pilotage.errors import ConfigError
from pilotage.integrations.skyrl.interface import BatchMetadata, GeneratorInput, TrajectoryId
from pilotage.types import RolloutRequest, SamplingParams, Task

TASK_COLUMN = "task_path"
"""Of the dataset: a Harbor task's directory."""
_OURS = frozenset({"temperature", "top_p", "top_k", "max_tokens"})
_OF_THE_ENGINE = frozenset({"logprobs", "min_tokens", "skip_special_tokens", "include_stop_str_in_output"})
"""What SkyRL adds for its own generators; the sampler says these itself, and no rollout depends on them."""


def is_training(batch: GeneratorInput) -> bool:
    """Whether the rows of the batch are to be trained; without metadata they are."""
    metadata = batch.get("batch_metadata")
    return metadata is None or metadata.training_phase == "train"


def rollout_requests(batch: GeneratorInput, numbers: Iterator[int]) -> list[RolloutRequest]:
    """Return one request for each trajectory, in order.

    Args:
        numbers: fresh ones make the ids unique over the run.

    Raises:
        ConfigError: the batch lacks ids or tasks, or asks for sampling that rollouts cannot have.
    """
    ids, extras = batch.get("trajectory_ids"), batch.get("env_extras")
    if not ids:
        raise ConfigError(
            "SkyRL's batch has no trajectory_ids; rollouts of a prompt share a baseline by them"
        )
    if extras is None or len(extras) != len(ids):
        raise ConfigError(
            f"SkyRL's batch has {len(extras or ())} env_extras for {len(ids)} trajectories;"
            f" the dataset needs a column {TASK_COLUMN} with the directory of a Harbor task"
        )
    if is_training(batch):
        _check_groups(ids)
    sampling = sampling_params(batch.get("sampling_params"))
    phase = _phase(batch.get("batch_metadata"))
    tasks: dict[str, Task] = {}
    return [
        RolloutRequest(
            id=f"{phase}-{identity.instance_id}-{identity.repetition_id}-{next(numbers)}",
            group_id=identity.instance_id,
            task=_task(row, tasks),
            sampling=sampling,
        )
        for identity, row in zip(ids, extras, strict=True)
    ]


def sampling_params(asked: Mapping[str, object] | None) -> SamplingParams:
    """Read the sampling parameters that SkyRL gives a generator, which are vLLM's.

    Raises:
        ConfigError: something else than temperature, top_p, top_k or max_tokens is asked for.
    """
    if asked is None:
        raise ConfigError("SkyRL's batch has no sampling_params; set generator.sampling_params")
    for name, value in asked.items():
        is_neutral = value is None or (name == "min_p" and value == 0)
        if name not in _OURS | _OF_THE_ENGINE and not is_neutral:
            raise ConfigError(
                f"generator.sampling_params: rollouts cannot have {name} = {value!r}; leave it out"
            )
    top_k = _number(asked, "top_k", -1)
    try:
        return SamplingParams(
            temperature=_number(asked, "temperature", 1.0),
            top_p=_number(asked, "top_p", 1.0),
            top_k=max(int(top_k), 0),
            max_tokens=int(_number(asked, "max_tokens", SamplingParams().max_tokens)),
        )
    except ValueError as error:
        raise ConfigError(f"generator.sampling_params: {error}") from None


def _number(asked: Mapping[str, object], name: str, default: float) -> float:
    value = asked.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"generator.sampling_params.{name} = {value!r}: not a number")
    return value


def _check_groups(ids: Sequence[TrajectoryId]) -> None:
    sizes = Counter(identity.instance_id for identity in ids)
    if 1 in sizes.values():
        raise ConfigError(
            "generator.n_samples_per_prompt = 1: a rollout is compared with its siblings; set 2 or more"
        )


def _phase(metadata: BatchMetadata | None) -> str:
    if metadata is None:
        return "train"
    step = metadata.global_step
    return metadata.training_phase if step is None else f"{metadata.training_phase}-{step:04d}"


def _task(row: Mapping[str, object], known: dict[str, Task]) -> Task:
    path = row.get(TASK_COLUMN)
    if not isinstance(path, str):
        raise ConfigError(
            f"a row of the dataset has {TASK_COLUMN} = {path!r}; it is the directory of a Harbor task"
        )
    if path not in known:
        tasks = load_tasks([Path(path)])
        if len(tasks) != 1:
            raise ConfigError(f"{path}: {len(tasks)} Harbor tasks; a row of the dataset is one task")
        known[path] = tasks[0]
    return known[path]
