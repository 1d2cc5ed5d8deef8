"""A decoder for any causal language model that transformers can run, row by row through its module.

Slower than the fused decoder, by about the batch size. A context is reused only where a finished one is
wholly its prefix, as between the turns of a conversation, because not every architecture's cache can be
cut or copied.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from pilotage.engine.kv_cache import Lease
from pilotage.types import TokenIds


@dataclass(slots=True, kw_only=True, eq=False)
class _State:
    """One context: its ids, and the module's cache for them."""

    token_ids: list[int] = field(default_factory=list[int])
    cache: Cache


class ModuleDecoder:
    """See the module's docstring; implements `Decoder`."""

    def __init__(self, module: PreTrainedModel, *, max_batch: int, num_kept: int) -> None:
        self.max_batch = max_batch
        self.device = module.device
        self.vocab_size = int(module.config.vocab_size)
        # transformers renames the argument, model by model, from version 5.24 on.
        takes_cache = "cache" in inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"
        self._num_kept = num_kept
        self._module = copy.deepcopy(module)  # the trainer changes its own while this one samples
        self._leased: dict[int, _State] = {}
        self._rows: list[_State] = []
        self._kept: list[_State] = []  # oldest first
        self._next_slot = 0

    def load(self, module: PreTrainedModel) -> None:
        """Take over a module's weights and forget every context."""
        assert not self._leased, "a leased context would keep keys of old weights"
        assert not self._rows, "a row would keep keys of old weights"
        self._module.load_state_dict(module.state_dict())
        self._kept.clear()

    def acquire(self, context_ids: TokenIds) -> Lease:
        """Go on from the longest finished context that is a prefix of this one, or from nothing."""
        ids = context_ids.tolist()
        prefixes = [state for state in self._kept if state.token_ids == ids[: len(state.token_ids)]]
        if prefixes:
            state = max(prefixes, key=lambda candidate: len(candidate.token_ids))
            self._kept.remove(state)
        else:
            state = _State(cache=DynamicCache(config=self._module.config))
        self._next_slot += 1
        self._leased[self._next_slot] = state
        return Lease(slot=self._next_slot, context_ids=context_ids, computed=len(state.token_ids))

    def prefill(self, leases: Sequence[Lease], *, budget_tokens: int) -> None:
        """Compute the contexts one after the other."""
        for lease in leases:
            count = min(lease.context_ids.size - lease.computed, budget_tokens)
            if count:
                part = lease.context_ids[lease.computed : lease.computed + count].tolist()
                self._feed(self._module.base_model, self._leased[lease.slot], part)
                lease.computed += count
                budget_tokens -= count

    def release(self, lease: Lease) -> None:
        """Give back a lease that did not enter."""
        self._keep(self._leased.pop(lease.slot))

    def enter(self, lease: Lease) -> None:
        """Make a computed context the last row of the batch."""
        self._rows.append(self._leased.pop(lease.slot))

    def decode(self, token_ids_B: NDArray[np.int64]) -> Tensor:
        """Append one token to every row, and return [B, V] logits of the next."""
        pairs = zip(self._rows, token_ids_B.tolist(), strict=True)
        return torch.stack(
            [self._feed(self._module, state, [token])["logits"][0, -1] for state, token in pairs]
        )

    def leave(self, row: int) -> None:
        """Take a row out; the last row takes its place."""
        self._keep(self._rows[row])
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _feed(self, module: torch.nn.Module, state: _State, ids: list[int]) -> dict[str, Tensor]:
        """Run ids after a context; its cache grows in place."""
        input_ids = torch.tensor([ids], device=self.device)
        state.token_ids += ids
        return module(input_ids=input_ids, use_cache=True, **{self._cache_argument: state.cache})

    def _keep(self, state: _State) -> None:
        if state.token_ids:
            self._kept.append(state)
            del self._kept[: -self._num_kept]
