"""What the sampling loop needs from a model: contexts in, next-token logits of a batch out."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pilotage.engine.kv_cache import Lease
from pilotage.types import TokenIds


class Decoder(Protocol):
    """A model with room for `max_batch` sequences that decode together. One thread owns it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def max_batch(self) -> int:
        """Most rows that decode together."""
        ...

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    def acquire(self, context_ids: TokenIds) -> Lease | None:
        """Make room for a context, reusing what is known of it; None: ask again after a prefill."""
        ...

    def prefill(self, leases: Sequence[Lease], *, budget_tokens: int) -> None:
        """Compute the contexts, first come first served, up to about `budget_tokens` of them."""
        ...

    def release(self, lease: Lease) -> None:
        """Give back a lease that did not enter."""
        ...

    def enter(self, lease: Lease) -> None:
        """Make a computed context the last row of the batch."""
        ...

    def decode(self, token_ids_B: NDArray[np.int64]) -> Tensor:
        """Append one token to every row, and return [B, V] logits of the next."""
        ...

    def leave(self, row: int) -> None:
        """Take a row out; the last row takes its place. Its context may be reused."""
        ...

    def load(self, module: PreTrainedModel) -> None:
        """Take over a module's weights and forget every context; no lease may be out."""
        ...
