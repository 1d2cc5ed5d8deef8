"""What the ranks of a test's world are told to do; results are small and picklable."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pilotage.engine.checkpoint import Manifest
from pilotage.engine.distributed.fsdp import FsdpTrainer, TrainerOptions
from pilotage.engine.distributed.sharding import whole
from pilotage.types import AdamParams, Denominators, ForwardBackwardResult, LossConfig, Sample, StepResult

CPU = torch.device("cpu")
EXACT = TrainerOptions(micro_batch_tokens=40, compute_dtype="float32")
type Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What a rank has after some steps; only rank 0 has results."""

    results: list[ForwardBackwardResult]
    steps: list[StepResult]
    weights: Weights


def open_trainer(model_dir: Path, options: TrainerOptions = EXACT) -> FsdpTrainer:
    return FsdpTrainer(model_dir, options=options, device=CPU)


def weights_of(trainer: FsdpTrainer) -> Weights:
    return {name: weight.float().numpy().copy() for name, weight in trainer.gather_weights().items()}


def train(
    model_dir: Path,
    batches: Sequence[Sequence[Sample]],
    loss: LossConfig,
    params: AdamParams,
    options: TrainerOptions = EXACT,
) -> Trained:
    """Take one step on each batch; only rank 0 is given the batches."""
    trainer = open_trainer(model_dir, options)
    results: list[ForwardBackwardResult] = []
    steps: list[StepResult] = []
    for samples in batches:
        result = trainer.forward_backward(samples if trainer.is_lead else None, loss)
        results += [] if result is None else [result]
        steps.append(trainer.step(params))
    return Trained(results=results, steps=steps, weights=weights_of(trainer))


def train_in_pieces(
    model_dir: Path, pieces: Sequence[Sequence[Sample]], loss: LossConfig, params: AdamParams
) -> Trained:
    """Take one step on a batch that comes in pieces, with the counts of the whole."""
    trainer = open_trainer(model_dir)
    counts = Denominators.of([sample for piece in pieces for sample in piece])
    results = [
        trainer.forward_backward(piece if trainer.is_lead else None, loss, denominators=counts)
        for piece in pieces
    ]
    steps = [trainer.step(params)]
    return Trained(results=[r for r in results if r is not None], steps=steps, weights=weights_of(trainer))


def score(model_dir: Path, samples: Sequence[Sample], temperature: float) -> Any:
    trainer = open_trainer(model_dir)
    return trainer.forward(samples if trainer.is_lead else None, temperature=temperature)


def misuse(model_dir: Path, broken: Sequence[Sample], good: Sequence[Sample], loss: LossConfig) -> list[str]:
    """Return what went wrong, in order; the trainer must survive all of it."""
    trainer = open_trainer(model_dir)
    before = weights_of(trainer)
    told: list[str] = []
    for samples in (None, broken):
        if samples is not None:
            trainer.forward_backward(samples if trainer.is_lead else None, loss)
        try:
            trainer.step(AdamParams(learning_rate=0.1))
        except Exception as error:  # noqa: BLE001 - what the test compares
            told.append(f"{type(error).__name__}: {error}")
    after = weights_of(trainer)
    told.append(f"unchanged {all(np.array_equal(before[name], after[name]) for name in before)}")
    trainer.forward_backward(good if trainer.is_lead else None, loss)
    told.append(f"num_backwards {trainer.step(AdamParams()).num_backwards}")
    return told


def recomputed_layers(model_dir: Path, samples: Sequence[Sample], loss: LossConfig) -> dict[bool, int]:
    """Count how often layers project attention in one forward_backward, with and without recomputing."""
    counts: dict[bool, int] = {}
    for recompute in (False, True):
        options = TrainerOptions(
            micro_batch_tokens=1 << 20, compute_dtype="float32", recompute_activations=recompute
        )
        trainer = open_trainer(model_dir, options)
        calls: list[int] = []
        for name, part in trainer.module.named_modules():
            if name.endswith("o_proj"):

                def count(*_: object, calls: list[int] = calls) -> None:
                    calls.append(1)

                part.register_forward_pre_hook(count)
        trainer.forward_backward(samples if trainer.is_lead else None, loss)
        counts[recompute] = len(calls)
    return counts


def save(
    model_dir: Path,
    samples: Sequence[Sample],
    loss: LossConfig,
    params: AdamParams,
    directory: Path,
    options: TrainerOptions = EXACT,
) -> Weights:
    """Take one step, save, and return the weights."""
    trainer = open_trainer(model_dir, options)
    trainer.forward_backward(samples if trainer.is_lead else None, loss)
    trainer.step(params)
    trainer.save_state(directory, Manifest(weights_version=7, is_published=False))
    return weights_of(trainer)


def resume(
    model_dir: Path,
    start: Path,
    samples: Sequence[Sample],
    loss: LossConfig,
    params: AdamParams,
    end: Path | None = None,
    options: TrainerOptions = EXACT,
) -> tuple[Weights, Weights]:
    """Load, take one step, save; return the weights after the load and after the step."""
    trainer = open_trainer(model_dir, options)
    trainer.load_state(start)
    loaded = weights_of(trainer)
    trainer.forward_backward(samples if trainer.is_lead else None, loss)
    trainer.step(params)
    if end is not None:
        trainer.save_state(end, Manifest(weights_version=8, is_published=False))
    return loaded, weights_of(trainer)


def parameters_after_step(
    model_dir: Path, samples: Sequence[Sample], loss: LossConfig, params: AdamParams, options: TrainerOptions
) -> tuple[Weights, Weights]:
    """Return every parameter by its own name before and after one step."""
    trainer = open_trainer(model_dir, options)

    def snapshot() -> Weights:
        return {name: whole(value).numpy().copy() for name, value in trainer.module.named_parameters()}

    before = snapshot()
    trainer.forward_backward(samples if trainer.is_lead else None, loss)
    trainer.step(params)
    return before, snapshot()
