"""Array aliases, and the one place where an array is made read-only.

Shape suffixes used in array code: `G` group, `B` batch, `L` tokens of a sample, `C` context tokens of a
turn, `K` sampled tokens of a turn, `V` vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

type TokenIds = NDArray[np.int32]
"""[n] token ids."""
type Logprobs = NDArray[np.float32]
"""[n] natural-log probabilities."""
type Versions = NDArray[np.int32]
"""[n] weights versions."""
type Mask = NDArray[np.bool_]
"""[n] booleans, True where a loss reads."""


def token_ids(values: ArrayLike | Iterable[int]) -> TokenIds:
    """Return `values` as a fresh int32 array of one dimension."""
    return np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)  # pyright: ignore


def freeze(*arrays: NDArray[Any]) -> None:
    """Make arrays read-only, so that a frozen record is frozen all the way down."""
    for array in arrays:
        array.flags.writeable = False


def require_shape(owner: str, length: int, **arrays: NDArray[Any]) -> None:
    """Raise ValueError unless every array has shape `[length]`."""
    for name, array in arrays.items():
        if array.shape != (length,):
            raise ValueError(f"{owner}.{name} has shape {array.shape}, expected ({length},)")
