"""The program of an engine process: `python -m pilotage.cli.engine KIND DIRECTORY`, run by the service."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pilotage.errors import ConfigError, TemplateError
from pilotage.interfaces import Engine
from pilotage.rendering import load_renderer
from pilotage.service.engine_host import JobSpec
from pilotage.service.engine_process import serve_engine

if TYPE_CHECKING:
    from pilotage.engine.distributed.ray_engine import ClusterConfig


async def open_local(spec: JobSpec) -> Engine:
    """Open the local engine with a job's sizes."""
    from pilotage.engine import LocalEngine
    from pilotage.engine.lora import LoraOptions

    sizes = spec.body.extras.engine
    return await LocalEngine.open(
        spec.model_dir,
        max_context_tokens=spec.body.max_context_tokens,
        max_batch=sizes.max_batch,
        stop_token_ids=_stop_token_ids(spec),
        trainer_threads=sizes.trainer_threads,
        micro_batch_tokens=sizes.micro_batch_tokens,
        lora=LoraOptions.of(spec.body.adapter, seed=spec.body.adapter_seed),
    )


async def open_ray(spec: JobSpec) -> Engine:
    """Open an engine of Ray actors with a job's sizes; without CUDA devices they run on the CPU."""
    import torch

    from pilotage.engine.distributed.ray_engine import RayEngine

    return await RayEngine.open(spec.model_dir, cluster_config(spec, has_gpus=torch.cuda.is_available()))


def cluster_config(spec: JobSpec, *, has_gpus: bool) -> "ClusterConfig":
    """Return a rank for each GPU of the trainer, and replicas that fill the samplers' GPUs.

    Raises:
        ConfigError: the job has no trainer or no sampler, or replicas do not fill the samplers' GPUs.
    """
    from pilotage.engine.distributed.fsdp import TrainerOptions
    from pilotage.engine.distributed.ray_engine import ClusterConfig
    from pilotage.engine.lora import LoraOptions

    body, sizes = spec.body, spec.body.extras.engine
    num_sampling = body.n_gpus - (0 if body.trainer is None else body.trainer.n_gpus)
    if body.trainer is None or num_sampling % sizes.tensor_parallel or not num_sampling:
        raise ConfigError(
            "an engine on Ray needs a training sub-job, and sampling sub-jobs whose n_gpus are a multiple of"
            f" tensor_parallel {sizes.tensor_parallel}; got {num_sampling} for sampling"
        )
    trainer = TrainerOptions(
        micro_batch_tokens=sizes.micro_batch_tokens,
        compute_dtype="bfloat16" if has_gpus else "float32",
        lora=LoraOptions.of(body.adapter, seed=body.adapter_seed),
    )
    return ClusterConfig(
        trainer_ranks=body.trainer.n_gpus,
        sampler_replicas=num_sampling // sizes.tensor_parallel,
        device="cuda" if has_gpus else "cpu",
        tensor_parallel=sizes.tensor_parallel,
        max_context_tokens=body.max_context_tokens,
        max_batch=sizes.max_batch,
        stop_token_ids=_stop_token_ids(spec),
        trainer=trainer,
    )


OPENERS = {"local": open_local, "ray": open_ray}
"""What `pilotage serve --engine` names."""


def _stop_token_ids(spec: JobSpec) -> tuple[int, ...] | None:
    """Return what the job gives, or what ends a turn in the chat template; None leaves it to the model."""
    given = spec.body.extras.engine.stop_token_ids
    if given:
        return given
    try:
        return tuple(load_renderer(spec.model_dir).stop_token_ids)
    except TemplateError:
        return None


def main() -> None:
    """Serve one job's engine."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _, kind, directory = sys.argv
    asyncio.run(serve_engine(Path(directory), OPENERS[kind]))


if __name__ == "__main__":
    main()
