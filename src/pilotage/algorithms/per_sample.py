"""Values of trained tokens: [n], sample after sample, and back to where the tokens stand."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotage.types import Sample


def split_trained[T: np.generic](samples: Sequence[Sample], values_n: NDArray[T]) -> list[NDArray[T]]:
    """Cut [n] values of trained tokens, sample after sample, into those of each sample."""
    ends = np.cumsum([sample.trained_tokens for sample in samples])
    return np.split(values_n, ends[:-1]) if samples else []


def aligned(samples: Sequence[Sample], values_n: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return for each sample [L] its values of trained tokens in place, 0 where the loss mask is not set."""
    rows = [np.zeros(sample.token_ids.size, np.float32) for sample in samples]
    for row, sample, values in zip(rows, samples, split_trained(samples, values_n), strict=True):
        row[sample.loss_mask] = values
    return rows


def in_order(
    samples: Sequence[Sample], scored: Iterable[tuple[Sequence[Sample], NDArray[np.floating]]]
) -> NDArray[np.float32]:
    """Return [n] values of trained tokens in the order of `samples`, which passes have mixed.

    Args:
        scored: of each pass its samples, the very objects, and [n] the values of their trained tokens.
    """
    values_of: dict[int, NDArray[np.floating]] = {}
    for of_pass, values_n in scored:
        values_of |= zip(map(id, of_pass), split_trained(of_pass, values_n), strict=True)
    parts = [values_of[id(sample)] for sample in samples if sample.trained_tokens]
    return np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32, casting="same_kind")
