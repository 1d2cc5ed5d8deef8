"""Tinker's losses as functions of log-probs: a value and its gradient, summed over tokens, never averaged.

The engine is asked for log-probs, the gradient of the loss with respect to them is computed here, and the
engine adds the gradient of a linear loss, `sum_n c_n logprob_n`, whose coefficients are that gradient. One
way for every loss; it also gives the log-probs that every call of the wire returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import TrainedTokens, policy_loss
from pilotage.errors import InvalidBodyError
from pilotage.types import Denominators, LossConfig, Mask, PolicyLoss, Reduction, Sample
from pilotage.wire.tinker import Datum

type _Floats = NDArray[np.float64]

LINEAR = LossConfig(
    policy_loss=PolicyLoss.CISPO, on_policy=True, reduction=Reduction.DR_GRPO, dr_grpo_tokens=1
)
"""With `ONE` as denominators: minus the sum of advantage x log-prob."""
ONE = Denominators(trained_tokens=1, num_sequences=1)
_NO_CLIP = 1e30
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_RATIO_LOSSES = {
    "importance_sampling": PolicyLoss.GRPO,
    "ppo": PolicyLoss.GRPO,
    "cispo": PolicyLoss.CISPO,
    "gspo": PolicyLoss.GSPO,
}
_SETTINGS: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
    "dro": ("beta",),
}
LOSSES = tuple(_SETTINGS)
_DRO_BETA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TinkerLoss:
    """A loss over some datums."""

    value: float
    gradients: Sequence[_Floats]
    """Of each datum [N], with respect to the log-prob of each target."""


def require_known(loss_fn: str, config: Mapping[str, float | str]) -> None:
    """Refuse a loss, or a setting of one, that cannot be had.

    Raises:
        InvalidBodyError: with what there is.
    """
    if loss_fn not in _SETTINGS:
        raise InvalidBodyError(
            "loss_fn", f"{loss_fn!r} cannot be had here; there are {', '.join(LOSSES)}, and custom losses"
            " that the SDK runs on the client"
        )  # fmt: skip
    for name, value in config.items():
        if name not in _SETTINGS[loss_fn]:
            known = ", ".join(_SETTINGS[loss_fn]) or "none"
            raise InvalidBodyError(
                f"loss_fn_config.{name}", f"{loss_fn} has no such setting; there are {known}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NO_CLIP:
            raise InvalidBodyError(f"loss_fn_config.{name}", f"expected a number from 0 on, got {value!r}")


def scored(datum: Datum) -> Mask:
    """Return [N] True where the target is the token that follows, so that its log-prob can be had.

    Callers pad the targets of a prompt, which count for nothing.
    """
    following = np.append(datum.input_ids[1:], datum.targets[-1])
    return datum.targets == following


def evaluate(
    loss_fn: str, config: Mapping[str, float | str], data: Sequence[Datum], logprobs: Sequence[_Floats]
) -> TinkerLoss:
    """Evaluate a loss.

    With p the policy's log-prob of a target, q the sampler's (`logprobs`), A its `advantages`, w its
    `weights`, r = exp(p - q) and b(r) = r clipped to the thresholds (0.8 and 1.2 unless the config says
    otherwise), the loss is the sum over all tokens of

        cross_entropy        -w p
        importance_sampling  -r A
        ppo                  -min(r A, b(r) A)
        cispo                -stop-gradient(b(r)) A p
        gspo                 as ppo, with the geometric mean of r over the datum in place of r: over its
                             `sequence_ratio_mask`, or, where absent, its tokens with an advantage
        dro                  -p A + beta (p - q)^2 / 2, over tokens with an advantage

    Args:
        logprobs: of each datum [N], p.

    Raises:
        InvalidBodyError: a datum lacks what the loss reads, or counts a target that does not follow.
    """
    if loss_fn in _RATIO_LOSSES:
        return _ratio_loss(loss_fn, config, data, logprobs)
    value, gradients = 0.0, list[_Floats]()
    for index, (datum, p) in enumerate(zip(data, logprobs, strict=True)):
        if loss_fn == "cross_entropy":
            weights = _column(datum, "weights", index)
            value, gradient = value - float(weights @ p), -weights
        else:
            beta = float(config.get("beta", _DRO_BETA))
            advantages, drift = _column(datum, "advantages", index), p - _column(datum, "logprobs", index)
            counted = advantages != 0
            value += float(counted @ (-p * advantages + 0.5 * beta * drift**2))
            gradient = np.where(counted, -advantages + beta * drift, 0.0)
        _require_following(datum, gradient != 0, index)
        gradients.append(gradient)
    return TinkerLoss(value=value, gradients=gradients)


def as_samples(data: Sequence[Datum], masks: Sequence[Mask], coefficients: Sequence[_Floats]) -> list[Sample]:
    """Return the samples whose `LINEAR` loss is minus the sum of coefficient x log-prob over the masks.

    Args:
        masks: of each datum [N], within `scored`.
        coefficients: of each datum [N].
    """
    samples: list[Sample] = []
    for index, (datum, mask, values) in enumerate(zip(data, masks, coefficients, strict=True)):
        size = datum.input_ids.size + 1
        trained = np.append(False, mask)
        samples.append(
            Sample(
                sequence_id=str(index),
                group_id="",
                token_ids=np.append(datum.input_ids, datum.targets[-1]).astype(np.int32),
                loss_mask=trained,
                sampler_logprobs=np.zeros(size, np.float32),
                advantages=np.where(trained, np.append(0.0, values), 0.0).astype(np.float32),
                weights_versions=np.where(trained, 0, -1).astype(np.int32),
            )
        )
    return samples


def _ratio_loss(
    loss_fn: str, config: Mapping[str, float | str], data: Sequence[Datum], logprobs: Sequence[_Floats]
) -> TinkerLoss:
    low, high = (0.0, _NO_CLIP) if loss_fn == "importance_sampling" else (0.8, 1.2)
    low, high = float(config.get(_CLIPS[0], low)), float(config.get(_CLIPS[1], high))
    if not 0 <= low < 1 < high:
        raise InvalidBodyError("loss_fn_config", f"the thresholds lie around 1, got {low:g} and {high:g}")
    settings = LossConfig(
        policy_loss=_RATIO_LOSSES[loss_fn],
        clip_low=1 - low,
        clip_high=high - 1,
        reduction=Reduction.DR_GRPO,
        dr_grpo_tokens=1,
    )
    advantages = [_column(datum, "advantages", index) for index, datum in enumerate(data)]
    behaviour = [_column(datum, "logprobs", index) for index, datum in enumerate(data)]
    masks = [
        datum.inputs["sequence_ratio_mask"] != 0
        if loss_fn == "gspo" and "sequence_ratio_mask" in datum.inputs
        else advantage != 0
        for datum, advantage in zip(data, advantages, strict=True)
    ]
    for index, (datum, mask, advantage) in enumerate(zip(data, masks, advantages, strict=True)):
        _require_following(datum, mask, index)
        if (advantage[~mask] != 0).any():
            where = f"data.{index}.loss_fn_inputs.sequence_ratio_mask"
            raise InvalidBodyError(where, "a token outside of the mask has an advantage")
    tokens = TrainedTokens(
        sequence_n=np.repeat(np.arange(len(data)), [int(mask.sum()) for mask in masks]),
        sampler_logprobs_n=_picked(behaviour, masks),
        advantages_n=_picked(advantages, masks),
    )
    result = policy_loss(tokens, _picked(logprobs, masks), settings, denominators=ONE)
    parts = np.split(result.gradient_n, np.cumsum([int(mask.sum()) for mask in masks])[:-1])
    gradients: list[_Floats] = []
    for mask, part in zip(masks, parts, strict=True):
        gradient = np.zeros(mask.size)
        gradient[mask] = part
        gradients.append(gradient)
    return TinkerLoss(value=result.loss, gradients=gradients)


def _picked(values: Sequence[NDArray[Any]], masks: Sequence[Mask]) -> _Floats:
    parts = [value[mask] for value, mask in zip(values, masks, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def _column(datum: Datum, name: str, index: int) -> _Floats:
    values = datum.inputs.get(name)
    if values is None:
        raise InvalidBodyError(f"data.{index}.loss_fn_inputs.{name}", "missing; the loss reads it")
    return values.astype(np.float64)


def _require_following(datum: Datum, counted: Mask, index: int) -> None:
    wrong = np.flatnonzero(counted & ~scored(datum))
    if wrong.size:
        raise InvalidBodyError(
            f"data.{index}.loss_fn_inputs.target_tokens",
            f"position {wrong[0]} counts, but its target {datum.targets[wrong[0]]} is not the token that"
            " follows in model_input",
        )
