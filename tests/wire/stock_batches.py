"""Batches of the stock wire, put together from rows by hand, and what our losses say of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import LossValue, TrainedTokens, policy_loss
from pilotage.types import Denominators
from pilotage.wire.grpo import BatchLayout, from_stock

type Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence; entry i of everything but `ids` speaks of token i + 1."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float] = field(default_factory=list[float])
    old: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])
    reference: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        zeros = [0.0] * len(self.ids)
        self.logprobs, self.old = self.logprobs or zeros, self.old or zeros
        self.advantages, self.reference = self.advantages or zeros, self.reference or zeros


def random_rows(rng: np.random.Generator, *, one_advantage: bool = False) -> list[Row]:
    """Two to four rows with garbage outside of the mask; float32 values, as they cross the wire."""
    rows: list[Row] = []
    for index in range(int(rng.integers(2, 5))):
        size = int(rng.integers(2, 9))
        mask = rng.random(size) < 0.6
        mask[-1] = False
        mask[0] = True if index == 0 else mask[0]
        logprobs = (-rng.exponential(1.5, size)).astype(np.float32)
        advantages = rng.normal(size=1 if one_advantage else size) + np.zeros(size)
        rows.append(
            Row(
                ids=rng.integers(0, 99, size).tolist(),
                mask=mask.astype(int).tolist(),
                logprobs=logprobs.tolist(),
                old=(logprobs + rng.normal(scale=0.4, size=size)).astype(np.float32).tolist(),
                advantages=np.where(mask, advantages, 0).astype(np.float32).tolist(),
                reference=(logprobs + rng.normal(scale=1.5, size=size)).astype(np.float32).tolist(),
            )
        )
    return rows


def stock_tree(
    rows: Sequence[Row], *, packed: bool = False, padding: int = 1, **config: Any
) -> dict[str, Any]:
    """Return the tree of a forward-backward; null columns are left out, padding holds garbage."""
    names = {
        "advantages": "advantages",
        "old_log_probs_shifted": "old",
        "ref_log_probs_shifted": "reference",
        "loss_mask": "mask",
    }
    if config.get("x-on-policy"):
        del names["old_log_probs_shifted"]
    if not config.get("use_kl_loss"):
        del names["ref_log_probs_shifted"]
    sizes = [len(row.ids) for row in rows]
    width = max(sizes) + padding

    def column(name: str, filler: float, dtype: type[np.generic]) -> NDArray[Any]:
        values = [getattr(row, name) for row in rows]
        if packed:
            return np.array([[value for part in values for value in part]], dtype)
        return np.array([part + [filler] * (width - len(part)) for part in values], dtype)

    context: dict[str, Any] = {
        key: column(name, 0 if name == "mask" else 7.5, np.int64 if name == "mask" else np.float32)
        for key, name in names.items()
    }
    kwargs: dict[str, Any] = {"input_ids": column("ids", 0, np.int64)}
    if packed:
        context["cu_seqlens"] = np.cumsum([0, *sizes]).astype(np.int32)
    else:
        kwargs["attention_mask"] = (np.arange(width) < np.array(sizes)[:, None]).astype(np.int64)
    return {
        "args": (),
        "kwargs": kwargs,
        "context": context,
        "processing": {"loss_fn": "grpo", "config": config, "post": ["identity"]},
    }


def evaluate(tree: dict[str, Any], rows: Sequence[Row]) -> tuple[LossValue, list[Floats]]:
    """Return our loss of a batch, and its gradient by row in the frame of the wire."""
    batch = from_stock(tree)
    by_token = [np.concatenate([[0.0], row.logprobs[:-1]]) for row in rows]
    masks = [sample.loss_mask for sample in batch.samples]
    references = [sample.reference_logprobs for sample in batch.samples]
    given = [r[mask] for r, mask in zip(references, masks, strict=True) if r is not None]
    result = policy_loss(
        TrainedTokens.of(batch.samples),
        np.concatenate([values[mask] for values, mask in zip(by_token, masks, strict=True)]),
        batch.loss,
        denominators=batch.denominators or Denominators.of(batch.samples),
        reference_logprobs_n=np.concatenate(given).astype(np.float64) if given else None,
    )
    parts = np.split(result.gradient_n, np.cumsum([mask.sum() for mask in masks])[:-1])
    gradient: list[Floats] = []
    for mask, part in zip(masks, parts, strict=True):
        shifted = np.zeros(mask.size)
        shifted[np.flatnonzero(mask) - 1] = part
        gradient.append(shifted)
    return result, gradient


def places(layout: BatchLayout) -> list[tuple[int, int]]:
    return list(zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True))
