"""Tinker's losses against torch, and what they refuse."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pilotage.errors import InvalidBodyError
from pilotage.service.tinker_losses import LOSSES, as_samples, evaluate, require_known, scored
from pilotage.wire.tinker import Datum

CONFIGS: Mapping[str, Mapping[str, float | str]] = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
}


def batch(seed: int) -> tuple[list[Datum], list[np.ndarray[Any, np.dtype[np.float64]]]]:
    """Return datums whose prompts have padded targets, and log-probs of their targets."""
    rng = np.random.default_rng(seed)
    data: list[Datum] = []
    logprobs: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for size in (5, 9, 3):
        ids = rng.integers(1, 50, size + 1)
        targets, prompt = ids[1:].copy(), size // 2
        targets[:prompt] = 0
        counted = np.arange(size) >= prompt
        inputs = {
            "target_tokens": targets,
            "weights": np.where(counted, rng.uniform(0, 1, size), 0).astype(np.float32),
            "advantages": np.where(counted, rng.normal(size=size), 0).astype(np.float32),
            "logprobs": np.where(counted, -rng.exponential(size=size), 0).astype(np.float32),
        }
        data.append(Datum(input_ids=ids[:-1].astype(np.int32), inputs=inputs))
        logprobs.append(inputs["logprobs"] + rng.normal(0, 0.3, size))
    return data, logprobs


def reference(loss_fn: str, config: Mapping[str, Any], datum: Datum, p: Tensor) -> Tensor:
    q, a, w = (
        torch.tensor(datum.inputs[k], dtype=torch.float64) for k in ("logprobs", "advantages", "weights")
    )
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    mask = a != 0
    ratio = torch.exp(p - q)
    match loss_fn:
        case "cross_entropy":
            return -(w * p).sum()
        case "importance_sampling":
            return -(ratio * a).sum()
        case "ppo":
            return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()
        case "cispo":
            return -(ratio.clamp(low, high).detach() * a * p).sum()
        case "gspo":
            sequence = torch.exp((p - q)[mask].mean())
            return -torch.minimum(sequence * a[mask], sequence.clamp(low, high) * a[mask]).sum()
        case _:
            beta = config.get("beta", 0.05)
            return -(p * a - 0.5 * beta * (p - q) ** 2)[mask].sum()


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_torch(loss_fn: str, seed: int) -> None:
    data, logprobs = batch(seed)
    config = CONFIGS.get(loss_fn, {})
    require_known(loss_fn, config)
    ours = evaluate(loss_fn, config, data, logprobs)
    leaves = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in logprobs]
    terms = [reference(loss_fn, config, datum, p) for datum, p in zip(data, leaves, strict=True)]
    loss = torch.stack(terms).sum()
    loss.backward()
    assert ours.value == pytest.approx(float(loss.detach()), abs=1e-9)
    for gradient, leaf in zip(ours.gradients, leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-9)


def test_gspo_takes_its_ratio_over_the_mask_that_the_caller_gives() -> None:
    data, logprobs = batch(0)
    whole = evaluate("gspo", {}, data, logprobs)
    widened = []
    for datum in data:
        mask = scored(datum).astype(np.float32)
        few = np.where(np.cumsum(datum.inputs["advantages"] != 0) <= 1, datum.inputs["advantages"], 0)
        widened.append(
            Datum(
                input_ids=datum.input_ids,
                inputs={**datum.inputs, "advantages": few, "sequence_ratio_mask": mask},
            )
        )
    over_mask = evaluate("gspo", {}, widened, logprobs)
    counted = [scored(datum) for datum in data]
    assert [(g != 0).tolist() for g in over_mask.gradients] == [c.tolist() for c in counted]
    assert whole.value != over_mask.value


def test_samples_train_what_counts_and_predict_the_last_target() -> None:
    data, _ = batch(3)
    masks = [scored(datum) for datum in data]
    samples = as_samples(data, masks, [np.full(mask.size, 2.0) for mask in masks])
    for sample, datum, mask in zip(samples, data, masks, strict=True):
        assert sample.token_ids.tolist() == [*datum.input_ids, datum.targets[-1]]
        assert sample.loss_mask.tolist() == [False, *mask]
        assert sample.advantages.tolist() == [0.0, *(2.0 * mask)]
    assert len({sample.sequence_id for sample in samples}) == len(samples)


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("stable_reinforce", {}, "'stable_reinforce' cannot be had here; there are cross_entropy"),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta: ppo has no such setting; there are clip_low_threshold"),
        ("dro", {"beta": "big"}, "loss_fn_config.beta: expected a number"),
        ("importance_sampling", {"clip_low_threshold": 0.5}, "there are none"),
    ],
)
def test_a_loss_or_setting_that_cannot_be_had_is_refused(
    loss_fn: str, config: Mapping[str, float | str], message: str
) -> None:
    with pytest.raises(InvalidBodyError, match=message):
        require_known(loss_fn, config)


def test_datums_that_a_loss_cannot_read_are_refused_with_their_place() -> None:
    data, logprobs = batch(1)
    moved = dict(data[1].inputs) | {"target_tokens": data[1].targets + 1}
    wrong = [data[0], Datum(input_ids=data[1].input_ids, inputs=moved), data[2]]
    with pytest.raises(InvalidBodyError, match=r"data\.1.*position 4 counts, but its target"):
        evaluate("cross_entropy", {}, wrong, logprobs)
    bare = [Datum(input_ids=data[0].input_ids, inputs={"target_tokens": data[0].targets})]
    with pytest.raises(InvalidBodyError, match=r"data\.0\.loss_fn_inputs\.advantages: missing"):
        evaluate("cispo", {}, bare, logprobs[:1])
    with pytest.raises(InvalidBodyError, match="thresholds lie around 1"):
        evaluate("ppo", {"clip_low_threshold": 1.5}, data, logprobs)
