"""The stock dialect of forward-backward, written: from samples and a loss to what a stock server reads.

The inverse of `grpo.from_stock`, for servers that know nothing else. Rows are padded at the tail; entry i of
every array of `context` speaks of token i + 1.

What the dialect cannot say is refused: one row is one sequence there, so a rollout with several branches has
no sequence ratio and no sequence mean; k3 is always clamped; logits are always of temperature 1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotage.errors import InvalidBodyError
from pilotage.types import Denominators, Logprobs, LossConfig, PolicyLoss, Reduction, Sample
from pilotage.wire.frames import TreeLike

KL_CAP = 10.0
"""The stock clamp of k3."""


_LOSSES = frozenset({PolicyLoss.GRPO, PolicyLoss.GSPO, PolicyLoss.CISPO})


def check_stock_loss(loss: LossConfig) -> None:
    """Refuse a loss that the dialect has no words for.

    Raises:
        InvalidBodyError: with the field, and what to use instead.
    """
    if loss.policy_loss not in _LOSSES:
        message = f"the stock dialect has no {loss.policy_loss}; use the strict core"
        raise InvalidBodyError("policy_loss", message)
    if loss.temperature != 1.0:
        raise InvalidBodyError("temperature", f"a stock trainer scores at 1.0 only, got {loss.temperature}")
    if loss.kl_coef and loss.kl_cap != KL_CAP:
        raise InvalidBodyError("kl_cap", f"a stock trainer clamps k3 at {KL_CAP:g}, got {loss.kl_cap}")
    if loss.kl_coef and loss.reduction is Reduction.DR_GRPO and loss.dr_grpo_tokens != 1:
        raise InvalidBodyError("dr_grpo_tokens", "a KL term cannot be divided by it on the stock wire; use 1")


def to_stock(
    samples: Sequence[Sample], loss: LossConfig, denominators: Denominators, *, wants_logprobs: bool
) -> TreeLike:
    """Return the tree of a forward-backward: B rows, one for each sample, S the longest.

    Args:
        wants_logprobs: ask for the log-probs of every row, [B, S] float32; `from_stock_rows` reads them.

    Raises:
        InvalidBodyError: the dialect cannot say it.
    """
    check_stock_loss(loss)
    _check_branches(samples, loss)
    lengths = np.array([sample.token_ids.size for sample in samples], np.int64)
    shape = (len(samples), int(lengths.max(initial=0)))
    is_token = np.arange(shape[1]) < lengths[:, None]
    ids = np.zeros(shape, np.int64)
    ids[is_token] = np.concatenate([sample.token_ids for sample in samples])
    scale = 1 / loss.dr_grpo_tokens if loss.reduction is Reduction.DR_GRPO else 1.0
    advantages = _shifted(shape, [sample.advantages * np.float32(scale) for sample in samples])
    context: dict[str, TreeLike] = {
        "input_ids": ids,
        "loss_mask": _shifted(shape, [sample.loss_mask for sample in samples]),
        "advantages": advantages,
    }
    if loss.reads_sampler_logprobs:
        context["old_log_probs_shifted"] = _shifted(shape, [sample.sampler_logprobs for sample in samples])
    if loss.kl_coef:
        context["ref_log_probs_shifted"] = _shifted(shape, _references(samples))
    return {
        "args": (),
        "kwargs": {
            "input_ids": ids,
            "attention_mask": is_token.astype(np.int64),
            "position_ids": np.where(is_token, np.arange(shape[1]), 0).astype(np.int64),
            "use_cache": False,
        },
        "context": context,
        "processing": {
            "loss_fn": "grpo",
            "config": _config(loss, denominators),
            "post": ["compute_logprobs"] if wants_logprobs else [],
        },
    }


def from_stock_rows(samples: Sequence[Sample], rows: NDArray[np.floating]) -> list[Logprobs]:
    """Cut the log-probs of a reply, [B, S] in the shifted frame, into [L] for each sample, 0 off its mask.

    Raises:
        InvalidBodyError: the array is not of these rows.
    """
    longest = max((sample.token_ids.size for sample in samples), default=0)
    if rows.ndim != 2 or rows.shape[0] != len(samples) or rows.shape[1] < longest - 1:
        raise InvalidBodyError("logprobs", f"expected [{len(samples)}, {longest}], got {list(rows.shape)}")
    found: list[Logprobs] = []
    for sample, row in zip(samples, rows, strict=True):
        logprobs = np.zeros(sample.token_ids.size, np.float32)
        logprobs[1:] = row[: sample.token_ids.size - 1]
        found.append(np.where(sample.loss_mask, logprobs, np.float32(0)))
    return found


def _shifted(shape: tuple[int, int], arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    """Return [B, S]: entry i + 1 of each array at column i."""
    padded = np.zeros(shape, arrays[0].dtype if arrays else np.float32)
    for row, array in zip(padded, arrays, strict=True):
        row[: array.size - 1] = array[1:]
    return padded


def _references(samples: Sequence[Sample]) -> list[Logprobs]:
    found = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    if len(found) < len(samples):
        raise InvalidBodyError(
            "reference_logprobs", "a stock trainer has no reference of its own; give them, or set kl_coef = 0"
        )
    return found


def _check_branches(samples: Sequence[Sample], loss: LossConfig) -> None:
    """Refuse rollouts of several rows where the loss speaks of rollouts."""
    trained = [sample.sequence_id for sample in samples if sample.trained_tokens]
    is_of_tokens = loss.policy_loss is not PolicyLoss.GSPO and loss.reduction is Reduction.TOKEN_MEAN
    if is_of_tokens or len(set(trained)) == len(trained):
        return
    name = next(name for name in trained if trained.count(name) > 1)
    raise InvalidBodyError(
        "sequence_id",
        f"rollout {name} has several branches, and a row is a sequence on the stock wire; use policy_loss"
        " grpo or cispo with reduction token_mean, or a service with the strict core",
    )


def _config(loss: LossConfig, denominators: Denominators) -> dict[str, TreeLike]:
    modes = {
        Reduction.TOKEN_MEAN: "token-mean",
        Reduction.SEQUENCE_MEAN: "seq-mean-token-mean",
        Reduction.DR_GRPO: "seq-mean-token-sum",  # its constant length is in the advantages
    }
    config: dict[str, TreeLike] = {
        "eps_clip": loss.clip_low,
        "eps_clip_higher": loss.clip_high,
        "loss_agg_mode": modes[loss.reduction],
        "entropy_coeff": 0.0,
    }
    # Without a count every rank divides by its own; dp_size is the server's to know.
    if loss.reduction is Reduction.TOKEN_MEAN:
        config["batch_num_tokens"] = denominators.trained_tokens
    else:
        config["global_batch_size"] = denominators.num_sequences
    if loss.dual_clip is not None:
        config["c_clip"] = loss.dual_clip
    if loss.policy_loss is PolicyLoss.GSPO:
        config["importance_sampling_level"] = "sequence"
    if loss.policy_loss is PolicyLoss.CISPO:
        config["use_cispo_loss"] = True
    if loss.on_policy:
        config["x-on-policy"] = True
    if loss.kl_coef:
        config |= {"use_kl_loss": True, "kl_loss_coef": loss.kl_coef, "kl_loss_type": "low_var_kl"}
    return config
