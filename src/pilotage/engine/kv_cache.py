"""Keys and values of past tokens: what makes a second turn, or a second rollout of a task, cheap.

One preallocated tensor holds two kinds of sequences. *Rows* 0, 1, 2, ... are being decoded; they lie next to
each other so that one batched product reads them all. *Slots* keep finished contexts, to be reused. A request
leases a slot, its context is computed there, it is copied into a row to decode, and what the row added is
copied back. Copying a context costs about a hundredth of computing it.

Invariant: keys and values below `lengths[i]` belong to exactly the ids `tokens[i, :lengths[i]]`, and a
leased slot only grows. So any sequence may take the longest prefix that it shares with any slot, and
whose rollout that was makes no difference.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotage.types import TokenIds

_WORTH_WAITING = 32
"""Tokens that another request must be about to compute for this one to wait a round and copy them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A slot in use by one request."""

    slot: int
    context_ids: TokenIds
    computed: int
    """How many of the context's ids have keys and values."""

    @property
    def is_computed(self) -> bool:
        """Whether the request can decode."""
        return self.computed == self.context_ids.size


class KvCache:
    """Rows and slots, and who may use which. Not thread-safe: one sampling thread owns it."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        max_context_tokens: int,
        max_batch: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        total = max_batch + num_slots
        self.max_batch = max_batch
        self.max_context_tokens = max_context_tokens
        self.kv = torch.zeros(
            (num_layers, 2, total, num_kv_heads, max_context_tokens, head_size), device=device
        )
        self.lengths: NDArray[np.int64] = np.zeros(total, np.int64)
        self.num_rows = 0
        self._tokens: NDArray[np.int32] = np.zeros((total, max_context_tokens), np.int32)
        self._planned: NDArray[np.int64] = np.zeros(total, np.int64)
        self._is_leased: NDArray[np.bool_] = np.zeros(total, np.bool_)
        self._used_at: NDArray[np.int64] = np.zeros(total, np.int64)
        self._clock = 0
        self._slot_of_row: list[int] = []

    def acquire(self, context_ids: TokenIds) -> Lease | None:
        """Lease a slot that holds as much of the context as any slot does.

        Returns:
            None where the request should ask again after the next prefill: no slot is free, or another
            request is about to compute most of what this one needs.
        """
        free = self.max_batch + np.flatnonzero(~self._is_leased[self.max_batch :])
        if free.size == 0:
            return None
        shared = self._shared_prefix(context_ids)
        ready = np.minimum(shared, self.lengths[self.max_batch :])
        best = int(ready.argmax())
        if shared.max() - ready[best] >= _WORTH_WAITING:
            return None
        source, length = self.max_batch + best, int(ready[best])
        if not self._is_leased[source] and length == self.lengths[source]:
            slot = source  # the whole slot is a prefix of the context: it goes on in place
        else:
            slot = int(free[self._used_at[free].argmin()])
            self._copy(source, slot, 0, length)
        self.lengths[slot] = length
        self._tokens[slot, : context_ids.size] = context_ids
        self._planned[slot] = context_ids.size
        self._is_leased[slot] = True
        self._touch(slot)
        return Lease(slot=slot, context_ids=context_ids, computed=length)

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """Note that keys and values of the next `num_tokens` of the context are in the slot."""
        lease.computed += num_tokens
        self.lengths[lease.slot] = lease.computed

    def release(self, lease: Lease) -> None:
        """Give back a slot that never decoded; what was computed stays for others."""
        self._planned[lease.slot] = lease.computed
        self._is_leased[lease.slot] = False

    def enter(self, lease: Lease) -> None:
        """Copy a computed context into the next row."""
        row = self.num_rows
        self._copy(lease.slot, row, 0, lease.computed)
        self.lengths[row] = lease.computed
        self._slot_of_row.append(lease.slot)
        self.num_rows += 1

    def append(self, token_ids_B: NDArray[np.int64]) -> None:
        """Note one more token in every row, whose keys and values the decode step has written."""
        rows = np.arange(self.num_rows)
        self._tokens[rows, self.lengths[rows]] = token_ids_B
        self.lengths[rows] += 1

    def leave(self, row: int) -> None:
        """Copy what the row added into its slot and release it; the last row takes the row's place."""
        slot, last = self._slot_of_row[row], self.num_rows - 1
        start, end = int(self.lengths[slot]), int(self.lengths[row])
        self._copy(row, slot, start, end)
        self._tokens[slot, start:end] = self._tokens[row, start:end]
        self.lengths[slot] = self._planned[slot] = end
        self._is_leased[slot] = False
        self._touch(slot)
        if row != last:
            end = int(self.lengths[last])
            self._copy(last, row, 0, end)
            self._tokens[row, :end] = self._tokens[last, :end]
            self.lengths[row] = end
        self._slot_of_row[row] = self._slot_of_row[last]
        self._slot_of_row.pop()
        self.num_rows = last

    def forget(self) -> None:
        """Drop everything, because the weights changed; nothing may be leased."""
        assert not self._is_leased.any(), "a leased slot would keep keys of old weights"
        self.lengths[:] = 0
        self._planned[:] = 0

    def _shared_prefix(self, context_ids: TokenIds) -> NDArray[np.int64]:
        """Return by slot how many leading ids of the context the slot has or will have."""
        size = context_ids.size
        differs = self._tokens[self.max_batch :, :size] != context_ids
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), size) if size else np.zeros(1, np.int64)
        return np.minimum(first, self._planned[self.max_batch :])

    def _copy(self, source: int, target: int, start: int, end: int) -> None:
        if start < end and source != target:
            self.kv[:, :, target, :, start:end] = self.kv[:, :, source, :, start:end]

    def _touch(self, index: int) -> None:
        self._clock += 1
        self._used_at[index] = self._clock
