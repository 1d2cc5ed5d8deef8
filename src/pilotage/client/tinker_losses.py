"""From our losses to those of the Tinker wire: one of the server's own where it says the same, else weights.

A loss of that wire is a sum over tokens, and its cross entropy is `-sum(weight x log-prob)`. So whatever the
loss, cross entropy with weights of minus its gradient with respect to the log-probs has the same gradient in
the model's weights. That takes a forward pass first, unless the gradient does not depend on the log-probs
(cross entropy, on-policy). Two losses of the server's need none either, with a reduction's weights, which are
positive, multiplied into the advantages:

    ppo      -sum min(r a, clip(r) a)                         GRPO without dual clip
    cispo    -sum stop-gradient(clip(r)) a log-prob           CISPO

Arrays for the wire are aligned to targets: entry i speaks of token i + 1. Pure; the SDK is not needed.

Source: the wire's losses, https://tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import TrainedTokens, aligned, logprob_gap, policy_loss
from pilotage.errors import ConfigError
from pilotage.types import Denominators, ForwardBackwardResult, LossConfig, PolicyLoss, Sample

type _Floats = NDArray[np.float64]
type WireRow = NDArray[np.float32]
"""[L - 1] values, one a target."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireLoss:
    """A batch's loss as one of the server's."""

    name: Literal["cross_entropy", "ppo", "cispo"]
    config: dict[str, float] | None
    inputs: list[dict[str, WireRow]]
    """Of each sample, what the loss reads beside the targets."""


def check_loss(loss: LossConfig) -> None:
    """Refuse what the wire cannot carry.

    Raises:
        ConfigError: with the key, and what to do.
    """
    if loss.temperature != 1.0:
        raise ConfigError(
            f"loss.temperature is {loss.temperature:g}: a Tinker server's trainer knows log-probs of"
            " temperature 1 only; set loop.loss.temperature and loop.sampling.temperature to 1"
        )
    if loss.kl_coef:
        raise ConfigError(
            f"loss.kl_coef is {loss.kl_coef:g}: a Tinker server gives no log-probs of a reference; set it to"
            " 0, or use another backend"
        )


def needs_forward(loss: LossConfig) -> bool:
    """Return whether the gradient can only be had with the log-probs at hand."""
    return loss.reads_sampler_logprobs and _native_name(loss) is None


def _native_name(loss: LossConfig) -> Literal["ppo", "cispo"] | None:
    if not loss.reads_sampler_logprobs:
        return None
    if loss.policy_loss is PolicyLoss.GRPO and loss.dual_clip is None:
        return "ppo"
    return "cispo" if loss.policy_loss is PolicyLoss.CISPO else None


def one_pass(samples: Sequence[Sample], loss: LossConfig, denominators: Denominators) -> WireLoss:
    """Return the loss of a batch that needs no forward pass of its own.

    Args:
        samples: whole rollouts.
    """
    tokens = TrainedTokens.of(samples)
    name = _native_name(loss)
    anywhere_n = np.zeros(tokens.advantages_n.size)
    if name is None:
        gradient_n = policy_loss(tokens, anywhere_n, loss, denominators=denominators).gradient_n
        return surrogate(samples, gradient_n)
    plain = replace(loss, policy_loss=PolicyLoss.CROSS_ENTROPY, dual_clip=None)
    weight_n = -policy_loss(tokens, anywhere_n, plain, denominators=denominators).gradient_n
    inputs = [
        {"logprobs": sample.sampler_logprobs[1:], "advantages": row}
        for sample, row in zip(samples, _spread(samples, weight_n * tokens.advantages_n), strict=True)
    ]
    config = {"clip_low_threshold": 1 - loss.clip_low, "clip_high_threshold": 1 + loss.clip_high}
    return WireLoss(name=name, config=config, inputs=inputs)


def surrogate(samples: Sequence[Sample], gradient_n: _Floats) -> WireLoss:
    """Return the cross entropy that has this gradient with respect to the log-probs of trained tokens."""
    inputs = [{"weights": row} for row in _spread(samples, -gradient_n)]
    return WireLoss(name="cross_entropy", config=None, inputs=inputs)


def no_loss(samples: Sequence[Sample]) -> WireLoss:
    """Return a loss of 0, for a pass that only scores."""
    return surrogate(samples, np.zeros(sum(sample.trained_tokens for sample in samples)))


def trained_values(samples: Sequence[Sample], rows: Sequence[NDArray[np.floating]]) -> _Floats:
    """Return [n] what the wire says of trained tokens, sample after sample."""
    parts = [row[sample.loss_mask[1:]] for sample, row in zip(samples, rows, strict=True)]
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def wire_loss_value(wire: WireLoss, rows: Sequence[NDArray[np.floating]]) -> float:
    """Return what a server that sums over tokens makes of these log-probs."""
    total = 0.0
    for inputs, row in zip(wire.inputs, rows, strict=True):
        logprobs = row.astype(np.float64)
        if wire.config is None:
            total -= float(inputs["weights"] @ logprobs)
            continue
        ratio = np.exp(logprobs - inputs["logprobs"])
        bounded = np.clip(ratio, wire.config["clip_low_threshold"], wire.config["clip_high_threshold"])
        advantages = inputs["advantages"].astype(np.float64)
        if wire.name == "ppo":
            total -= float(np.minimum(ratio * advantages, bounded * advantages).sum())
        else:
            total -= float((bounded * advantages) @ logprobs)
    return total


def measured(
    samples: Sequence[Sample], loss: LossConfig, denominators: Denominators, logprobs_n: _Floats
) -> ForwardBackwardResult:
    """Return the figures of a batch whose trained tokens have these log-probs."""
    tokens, counts = TrainedTokens.of(samples), Denominators.of(samples)
    value = policy_loss(tokens, logprobs_n, loss, denominators=denominators)
    gap = logprob_gap(logprobs_n, tokens.sampler_logprobs_n) if loss.reads_sampler_logprobs else None
    return ForwardBackwardResult(
        loss=value.loss,
        trained_tokens=counts.trained_tokens,
        forwarded_tokens=sum(sample.token_ids.size - 1 for sample in samples),
        num_sequences=counts.num_sequences,
        logprob_gap_mean=None if gap is None else gap.mean,
        logprob_gap_max=None if gap is None else gap.max,
        gap_k3=None if gap is None else gap.k3,
        clip_fraction=None if gap is None else value.clipped_tokens / counts.trained_tokens,
        trainer_logprobs_n=logprobs_n.astype(np.float32),
    )


def _spread(samples: Sequence[Sample], values_n: _Floats) -> list[WireRow]:
    """Put values of trained tokens where the wire looks for them, 0 elsewhere."""
    return [row[1:] for row in aligned(samples, values_n.astype(np.float32))]


def probe(token_id: int, size: int) -> Sample:
    """Return a sample that only serves to see how a server adds up."""
    mask = np.arange(size) > 0
    return Sample(
        sequence_id=f"probe-{size}",
        group_id="probe",
        token_ids=np.full(size, token_id, np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, np.float32(size - 4), np.float32(0)),
        weights_versions=np.where(mask, np.int32(0), np.int32(-1)),
    )
