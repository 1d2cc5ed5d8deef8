"""The stock dialect of forward-backward: `args`, `kwargs`, `context`, `processing` to samples and a loss.

Losses: `grpo` (also `ap_grpo`) with its modes PPO clip, dual clip, GSPO and CISPO, and `sft` / `sft_ce` (also
no `processing` at all, as the public command line sends it) as cross entropy over `labels`.

What the three counts mean together. There, each of `dp_size` ranks divides the sum of its token losses by
`batch_num_tokens` (token-mean) or the sum over its sequences by `global_batch_size` (the others) and
multiplies by `dp_size`, because gradients are then averaged over ranks: the result is the sum over all ranks
divided by the count. Here the loss is that of the whole call, whatever it runs on, divided by that same
count, so `dp_size` cancels. Without a count each rank there divides by its own; here it is the call's.

Invariant: what is accepted has the effect that it names. What the stock service takes and drops, or what
trains wrongly without an error there, is refused with the way that works.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pilotage.errors import InvalidBodyError
from pilotage.types import Denominators, LossConfig, Mask, PolicyLoss, Reduction, Sample
from pilotage.wire.fields import Fields
from pilotage.wire.frames import Tree
from pilotage.wire.rows import BatchLayout, Rows, matrix, read_token_rows, to_rows
from pilotage.wire.samples import scored_sample

__all__ = ["BatchLayout", "StockBatch", "StockRows", "from_stock", "read_rows", "to_rows"]

_GRPO_NAMES = ("grpo", "ap_grpo")
_SFT_NAMES = ("sft", "sft_ce")
_POSTS = ("identity", "compute_logprobs")
_IGNORE_INDEX = -100
_KL_CAP = 10.0
"""The stock clamps of k3; `algorithms.policy_loss` says why one number is both of them."""

_UNSUPPORTED_CONTEXT = {
    "prox_logp_shifted": "decoupled loss is not supported; send the behaviour log-probs alone",
    "versions": "is read by prox_logp_method loglinear only, which is not supported",
    "rollout_is_weights": "is not supported; multiply the advantages by them",
    "prompt_group_ids": "loss_agg_mode prompt-mean is not supported",
    "prompt_token_counts": "loss_agg_mode prompt-mean is not supported",
    "sequence_loss_weights": "loss_agg_mode prompt-mean is not supported; multiply the advantages by them",
    "sft_mask": "the echo losses are not supported",
    "echo_observation_mask": "the echo losses are not supported",
    "nll_mask": "the mixed losses are not supported; make a call of sft_ce beside this one",
    "return_fwd_batch": "is not supported; post compute_logprobs returns log-probs",
}
_OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "entropy_coeff": ((0,), "the stock term adds no gradient, only its value; set it to 0"),
    "use_sapo_loss": ((False,), "SAPO is not supported; use the clip, GSPO or CISPO"),
    "sapo_tau_pos": ((1.0,), "SAPO is not supported; leave it out"),
    "sapo_tau_neg": ((1.05,), "SAPO is not supported; leave it out"),
    "use_decoupled_loss": ((False,), "decoupled loss is not supported; send the behaviour log-probs alone"),
    "prox_logp_method": (("recompute",), "decoupled loss is not supported; leave it out"),
    "current_version": ((), "is read by prox_logp_method loglinear only, which is not supported"),
    "behav_imp_weight_cap": ((), "decoupled loss is not supported; leave it out"),
    "m2_threshold": ((), "M2PO is not supported; leave it out"),
}
"""Config keys that may only say what they say by default, and why."""
_UNSUPPORTED_PREFIXES = (
    "teacher_", "kd_", "echo_", "aux_ce_", "ratio_", "prob_diff_mask_", "seq_mask_", "log_ratio_",
)  # fmt: skip
_COUNT_KEYS = ("dp_size", "batch_num_tokens", "global_batch_size")
_LOSS_PARTS = (
    "advantages", "loss_mask", "old_log_probs_shifted", "ref_log_probs_shifted", *_COUNT_KEYS
)  # fmt: skip


class _GrpoConfig(BaseModel):
    """`processing.config` of grpo, as far as it is supported, with the stock defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    eps_clip: float = Field(default=0.2, gt=0)
    eps_clip_higher: float | None = Field(default=None, gt=0)
    c_clip: float | None = Field(default=None, gt=1)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    use_cispo_loss: bool = False
    is_weight_clip_max: float | None = Field(default=None, gt=1)
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: Literal["low_var_kl", "k3"] = "low_var_kl"
    on_policy: bool = Field(default=False, alias="x-on-policy")


_CONFIG_KEYS = tuple(info.alias or name for name, info in _GrpoConfig.model_fields.items())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StockBatch:
    """A forward-backward of the stock wire in our terms."""

    samples: list[Sample]
    """One for each row (or packed sequence) that holds a token, in order."""
    loss: LossConfig
    denominators: Denominators | None
    """None counts the call."""
    layout: BatchLayout
    wants_logprobs: bool
    """Whether `post` asks for log-probs; `to_rows` makes the array of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StockRows:
    """A forward of the stock wire in our terms: every token but the first of a sequence is scored."""

    samples: list[Sample]
    temperature: float
    layout: BatchLayout


def from_stock(tree: Tree) -> StockBatch:
    """Translate the decoded frame of a forward-backward.

    Raises:
        InvalidBodyError: it cannot have the effect that it names; path and reason say what to send instead.
    """
    body = Fields(tree)
    kwargs, context, processing = body.fields("kwargs"), body.fields("context"), body.fields("processing")
    _check_top(body, kwargs)
    for key, reason in _UNSUPPORTED_CONTEXT.items():
        if context.get(key) is not None:
            context.fail(key, reason)
    rows = read_token_rows(kwargs, context)
    config = processing.fields("config")
    wants_logprobs = "compute_logprobs" in _posts(processing)
    temperature = _temperature(rows, kwargs)
    loss_fn = None if processing.get("loss_fn") is None else processing.text("loss_fn")
    if loss_fn in _GRPO_NAMES:
        samples, loss = _grpo(rows, kwargs, context, config, temperature)
    elif loss_fn in _SFT_NAMES or (loss_fn is None and body.get("processing") is None):
        samples = _supervised(rows, kwargs)
        loss = LossConfig(
            policy_loss=PolicyLoss.CROSS_ENTROPY, reduction=Reduction.TOKEN_MEAN, temperature=temperature
        )
    else:
        processing.fail(
            "loss_fn", f"expected one of {', '.join((*_GRPO_NAMES, *_SFT_NAMES))}, got {loss_fn!r}"
        )
    denominators = _denominators(context, config, loss, Denominators.of(samples))
    for fields in (body, kwargs, context, processing, config):
        fields.close()
    return StockBatch(
        samples=samples,
        loss=loss,
        denominators=denominators,
        layout=rows.layout,
        wants_logprobs=wants_logprobs,
    )


def read_rows(tree: Tree) -> StockRows:
    """Translate the decoded frame of a forward.

    Every token but the first of a row is scored. What only a loss reads may be there, so that a client can
    send the frame of its forward-backward, and is not read.

    Raises:
        InvalidBodyError: it is no rows of token ids, or asks for more than log-probs.
    """
    body = Fields(tree)
    kwargs, context, processing = body.fields("kwargs"), body.fields("context"), body.fields("processing")
    _check_top(body, kwargs)
    rows = read_token_rows(kwargs, context)
    temperature = _temperature(rows, kwargs)
    _posts(processing)
    for fields, keys in ((kwargs, ("labels",)), (context, _LOSS_PARTS), (processing, ("loss_fn", "config"))):
        for key in keys:
            fields.get(key)
    for fields in (body, kwargs, context, processing):
        fields.close()
    samples = [
        scored_sample(ids, np.arange(ids.size) > 0, name=f"row-{index}")
        for index, ids in enumerate(rows.cut(rows.ids))
    ]
    return StockRows(samples=samples, temperature=temperature, layout=rows.layout)


def _check_top(body: Fields, kwargs: Fields) -> None:
    args = body.get("args")
    if args is not None and (not isinstance(args, list | tuple) or args):
        body.fail("args", "positional arguments are not supported; name them in kwargs")
    for key in ("rr_sample_ids", "rr_discard"):
        if body.get(key) is not None:
            body.fail(key, "router replay is not supported; leave it out")
    if kwargs.get("use_cache") not in (None, False):
        kwargs.fail("use_cache", "a training pass keeps no cache; leave it out, or set it to false")


def _posts(processing: Fields) -> list[str]:
    posts = processing.get("post")
    if posts is None:
        return []
    if not isinstance(posts, list | tuple):
        processing.fail("post", "expected a list of names")
    for index, name in enumerate(posts):
        if not isinstance(name, str) or name not in _POSTS:
            processing.fail(f"post.{index}", f"expected one of {', '.join(_POSTS)}, got {name!r}")
    return [str(name) for name in posts]


def _temperature(rows: Rows, kwargs: Fields) -> float:
    value = kwargs.get("temperature")
    if value is None:
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        values = np.array([value], np.float64)
    elif isinstance(value, np.ndarray) and value.size == 1:
        values = value.reshape(1).astype(np.float64)
    else:
        array = matrix(kwargs, "temperature", "fiu", rows.layout.shape)
        assert array is not None
        values = array.reshape(-1)[rows.is_token].astype(np.float64)
    if values.size and not (values == values[0]).all():
        kwargs.fail("temperature", "differs from token to token; send one call for each temperature")
    temperature = float(values[0]) if values.size else 1.0
    if not 0 < temperature < np.inf:
        kwargs.fail("temperature", f"must be positive and finite, got {temperature}")
    return temperature


# --- policy losses ---


def _grpo(
    rows: Rows, kwargs: Fields, context: Fields, config_fields: Fields, temperature: float
) -> tuple[list[Sample], LossConfig]:
    config = _read_config(config_fields)
    loss = _loss(config, config_fields, rows.layout, temperature)
    mask = _read_mask(rows, context)
    _check_labels(rows, kwargs, mask)
    behaviour = _read_behaviour(rows, context, mask, loss)
    advantages = rows.unshift(_read_floats(rows, context, "advantages", mask))
    references: list[NDArray[np.float32]] | None = None
    if loss.kl_coef:
        references = rows.unshift(_read_floats(rows, context, "ref_log_probs_shifted", mask))
    elif context.get("ref_log_probs_shifted") is not None and not config.use_kl_loss:
        context.fail("ref_log_probs_shifted", "is not read without use_kl_loss; leave it out")
    masks = rows.unshift(mask)
    if loss.policy_loss is PolicyLoss.GSPO:
        advantages = [_mean_where(mask, values) for mask, values in zip(masks, advantages, strict=True)]
    samples = [
        Sample(
            sequence_id=f"row-{index}",
            group_id=f"row-{index}",
            token_ids=ids,
            loss_mask=masks[index],
            sampler_logprobs=behaviour[index],
            advantages=advantages[index],
            weights_versions=np.full(ids.size, -1, np.int32),
            reference_logprobs=None if references is None else references[index],
        )
        for index, ids in enumerate(rows.cut(rows.ids))
    ]
    return samples, loss


def _read_config(fields: Fields) -> _GrpoConfig:
    for key, (allowed, reason) in _OFF.items():
        value = fields.get(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in allowed):
            fields.fail(key, reason)
    for key in fields:
        if key.startswith(_UNSUPPORTED_PREFIXES):
            fields.fail(key, "the echo, teacher and distillation terms and the ratio masks are not supported")
    for name, info in _GrpoConfig.model_fields.items():
        if info.default is not None and fields.is_null(info.alias or name):
            fields.fail(info.alias or name, "null is no value here; leave it out for the default")
    return fields.model(_GrpoConfig, *_CONFIG_KEYS)


def _loss(config: _GrpoConfig, fields: Fields, layout: BatchLayout, temperature: float) -> LossConfig:
    clip_high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    clip_low = min(config.eps_clip, 1.0)  # a ratio is positive: beyond 1 there is no lower clip
    policy_loss = PolicyLoss.GRPO if config.importance_sampling_level == "token" else PolicyLoss.GSPO
    if config.use_cispo_loss:
        if policy_loss is PolicyLoss.GSPO:
            fields.fail("importance_sampling_level", "CISPO has token ratios; leave it out")
        if config.c_clip is not None:
            fields.fail("c_clip", "CISPO has no dual clip; leave it out")
        policy_loss = PolicyLoss.CISPO
        if config.is_weight_clip_max is not None:
            clip_low, clip_high = 1.0, config.is_weight_clip_max - 1
    elif config.is_weight_clip_max is not None:
        fields.fail("is_weight_clip_max", "is read with use_cispo_loss only")
    reduction, length = _reduction(config, fields, layout)
    return LossConfig(
        policy_loss=policy_loss,
        reduction=reduction,
        dr_grpo_tokens=length,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.c_clip,
        on_policy=config.on_policy,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_cap=_KL_CAP if config.use_kl_loss else None,
        temperature=temperature,
    )


def _reduction(config: _GrpoConfig, fields: Fields, layout: BatchLayout) -> tuple[Reduction, int]:
    """Return the reduction, and the constant length that it divides by."""
    match config.loss_agg_mode:
        case "token-mean":
            return Reduction.TOKEN_MEAN, 1
        case "seq-mean-token-mean":
            return Reduction.SEQUENCE_MEAN, 1
        case "seq-mean-token-sum":
            return Reduction.DR_GRPO, 1
        case "seq-mean-token-sum-norm":
            if layout.is_packed:
                fields.fail(
                    "loss_agg_mode",
                    "divides by the width of padded rows, which packed rows do not have; use"
                    " seq-mean-token-sum with advantages divided by it",
                )
            return Reduction.DR_GRPO, layout.shape[1]


def _read_mask(rows: Rows, context: Fields) -> Mask:
    """Return [B x S] the mask in the frame of the wire."""
    array = matrix(context, "loss_mask", "biuf", rows.layout.shape)
    if array is None:
        context.fail("loss_mask", "missing")
    if not ((array == 0) | (array == 1)).all():
        context.fail("loss_mask", "is 0 or 1; scale the advantages to weigh tokens")
    mask = array.reshape(-1) != 0
    if not mask.any():
        context.fail("loss_mask", "no token is under the mask, so there is nothing to compute")
    is_wrong = mask & (rows.next_ids() < 0)
    if is_wrong.any():
        row, column = divmod(int(np.argmax(is_wrong)), rows.layout.shape[1])
        context.fail(
            f"loss_mask.{row}.{column}",
            "is on where no token follows; entry i is of the token at i + 1, so shift the mask to the left",
        )
    return mask


def _read_floats(rows: Rows, context: Fields, key: str, mask: Mask) -> NDArray[np.float32]:
    """Return [B x S] values under the mask, 0 elsewhere, in the frame of the wire."""
    array = matrix(context, key, "fiu", rows.layout.shape)
    if array is None:
        context.fail(key, "missing")
    values = np.where(mask, array.reshape(-1), 0).astype(np.float32)
    if not np.isfinite(values).all():
        row, column = divmod(int(np.argmin(np.isfinite(values))), rows.layout.shape[1])
        context.fail(f"{key}.{row}.{column}", "not finite")
    return values


def _read_behaviour(rows: Rows, context: Fields, mask: Mask, loss: LossConfig) -> list[NDArray[np.float32]]:
    key, stated = "old_log_probs_shifted", "processing.config.x-on-policy"
    is_given = context.get(key) is not None
    if loss.on_policy and is_given:
        context.fail(key, f"is not read with {stated}; leave out one of them")
    if not loss.on_policy and not is_given:
        context.fail(
            key,
            "missing: the ratio would be 1 and the clip would never bind; send the sampler's log-probs, or"
            f" state {stated}: true where one step follows each batch",
        )
    if loss.on_policy:
        return rows.unshift(np.zeros(mask.size, np.float32))
    return rows.unshift(_read_floats(rows, context, key, mask))


def _check_labels(rows: Rows, kwargs: Fields, mask: Mask) -> None:
    labels = matrix(kwargs, "labels", "iu", rows.layout.shape)
    if labels is not None and (labels.reshape(-1) != rows.next_ids())[mask].any():
        kwargs.fail("labels", "are not the next tokens under loss_mask; leave them out")


def _mean_where(mask: Mask, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace values by their mean, as the sequence ratio has one advantage."""
    mean = values[mask].mean(dtype=np.float64) if mask.any() else 0.0
    return np.where(mask, mean, 0).astype(np.float32)


# --- cross entropy ---


def _supervised(rows: Rows, kwargs: Fields) -> list[Sample]:
    """Return samples whose trained tokens are those that `labels` names.

    Labels come in two frames: that of Hugging Face (entry i is token i), and that of the public command line
    (entry i is token i + 1). They can only be the row's own tokens, so comparing tells which.
    """
    array = matrix(kwargs, "labels", "i", rows.layout.shape)
    if array is None:
        kwargs.fail("labels", "missing: without them there is no loss")
    labels = array.reshape(-1)
    is_target = labels != _IGNORE_INDEX
    if not (is_target & rows.is_token).any():
        kwargs.fail("labels", f"all are {_IGNORE_INDEX}, so there is nothing to compute")
    if (labels == rows.ids)[is_target].all() and rows.is_token[is_target].all():
        masks = [mask & (np.arange(mask.size) > 0) for mask in rows.cut(is_target)]
    elif (labels == rows.next_ids())[is_target].all():
        masks = rows.unshift(is_target)
    else:
        kwargs.fail(
            "labels",
            f"must be the row's own ids, at the token or one before it, or {_IGNORE_INDEX} elsewhere",
        )
    if not any(mask.any() for mask in masks):
        kwargs.fail("labels", "name first tokens only, which nothing predicts")
    parts = zip(rows.cut(rows.ids), masks, strict=True)
    return [scored_sample(ids, mask, name=f"row-{index}") for index, (ids, mask) in enumerate(parts)]


# --- denominators ---


def _denominators(
    context: Fields, config: Fields, loss: LossConfig, own: Denominators
) -> Denominators | None:
    """Return the counts of the batch that this call is a piece of; None where none is given."""
    given = {key: _count(context, config, key) for key in _COUNT_KEYS}
    tokens, sequences = given["batch_num_tokens"], given["global_batch_size"]
    reads_tokens = loss.reduction is Reduction.TOKEN_MEAN
    read = tokens if reads_tokens else sequences
    if read is None and (_positive(config, "dp_size") or 1) > 1:
        key = "batch_num_tokens" if reads_tokens else "global_batch_size"
        config.fail("dp_size", f"there it multiplies the loss where {key} is not given; give both or neither")
    if tokens is None and sequences is None:
        return None
    return Denominators(
        trained_tokens=own.trained_tokens if tokens is None else tokens,
        num_sequences=own.num_sequences if sequences is None else sequences,
    )


def _count(context: Fields, config: Fields, key: str) -> int | None:
    stated, configured = _positive(context, key), _positive(config, key)
    if stated is not None and configured is not None and stated != configured:
        raise InvalidBodyError(context.at(key), f"is {stated}, but {config.at(key)} is {configured}")
    return configured if stated is None else stated


def _positive(fields: Fields, key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iuf":
        value = float(value.reshape(()))
    if isinstance(value, bool) or not isinstance(value, int | float):
        fields.fail(key, "expected a whole number")
    if not 1 <= value < 2**53 or value != int(value):
        fields.fail(key, f"expected a whole number from 1 on, got {value!r}")
    return int(value)
