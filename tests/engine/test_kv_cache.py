import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.engine.kv_cache import KvCache, Lease
from pilotage.types import TokenIds, token_ids

CONTEXT = 12


def cache_of(*, max_batch: int = 2, num_slots: int = 4, context: int = CONTEXT) -> KvCache:
    return KvCache(
        num_layers=1,
        num_kv_heads=1,
        head_size=1,
        max_context_tokens=context,
        max_batch=max_batch,
        num_slots=num_slots,
        device=torch.device("cpu"),
    )


def compute(cache: KvCache, lease: Lease, count: int) -> None:
    """Stand in for prefill: the "key" of a token is the sum of all ids up to it."""
    prefix = np.cumsum(lease.context_ids)
    for position in range(lease.computed, lease.computed + count):
        cache.kv[:, :, lease.slot, :, position] = float(prefix[position])
    cache.advance(lease, count)


def decode(cache: KvCache, ids: list[int]) -> None:
    for row, token in enumerate(ids):
        at = int(cache.lengths[row])
        before = float(cache.kv[0, 0, row, 0, at - 1, 0]) if at else 0.0
        cache.kv[:, :, row, :, at] = before + token
    cache.append(np.array(ids))


def lease_of(cache: KvCache, context: TokenIds) -> Lease:
    lease = cache.acquire(context)
    assert lease is not None
    return lease


def finished(cache: KvCache, ids: list[int]) -> None:
    """Leave a context behind."""
    lease = lease_of(cache, token_ids(ids))
    compute(cache, lease, lease.context_ids.size - lease.computed)
    cache.release(lease)


def test_a_turn_goes_on_from_the_turn_before_it() -> None:
    cache = cache_of()
    lease = lease_of(cache, token_ids([1, 2]))
    compute(cache, lease, 2)
    cache.enter(lease)
    decode(cache, [3])
    decode(cache, [4])
    cache.leave(0)

    assert lease_of(cache, token_ids([1, 2, 3, 4, 5])).computed == 4


def test_a_context_takes_the_longest_prefix_and_leaves_its_owner_whole() -> None:
    cache = cache_of()
    finished(cache, [1, 2, 3, 4])
    branch = lease_of(cache, token_ids([1, 2, 9]))

    assert branch.computed == 2
    assert cache.kv[0, 0, branch.slot, 0, :2, 0].tolist() == [1, 3]
    assert lease_of(cache, token_ids([1, 2, 3, 4, 5])).computed == 4


def test_the_slot_that_was_unused_longest_is_given_up() -> None:
    cache = cache_of(num_slots=2)
    finished(cache, [1, 1])
    finished(cache, [2, 2])
    finished(cache, [1, 1, 1])  # uses the first again
    finished(cache, [3, 3])

    assert lease_of(cache, token_ids([2, 2])).computed == 0


def test_a_request_waits_for_a_prompt_that_a_sibling_is_computing() -> None:
    cache = cache_of(context=64)
    prompt = token_ids(range(1, 41))
    first = lease_of(cache, prompt)
    assert cache.acquire(prompt) is None
    compute(cache, first, 40)
    assert lease_of(cache, prompt).computed == 40


def test_a_request_does_not_wait_for_a_sibling_that_went_away() -> None:
    cache = cache_of(context=64)
    prompt = token_ids(range(1, 41))
    first = lease_of(cache, prompt)
    compute(cache, first, 3)
    cache.release(first)
    assert lease_of(cache, prompt).computed == 3


def test_no_free_slot_is_a_wait() -> None:
    cache = cache_of(num_slots=1)
    lease_of(cache, token_ids([1]))
    assert cache.acquire(token_ids([2])) is None


def test_forgetting_leaves_nothing_to_reuse() -> None:
    cache = cache_of()
    finished(cache, [1, 2, 3])
    cache.forget()
    assert lease_of(cache, token_ids([1, 2, 3])).computed == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_keys_are_always_those_of_the_ids_before_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, waiting, rows = cache_of(), list[Lease](), list[list[int]]()
    for _ in range(40):
        action = rng.integers(0, 5)
        if action == 0 and len(waiting) + len(rows) < cache.max_batch:
            lease = cache.acquire(rng.integers(1, 3, rng.integers(0, 6)).astype(np.int32))
            waiting += [lease] if lease is not None else []
        elif action == 1 and waiting:
            lease = waiting[rng.integers(len(waiting))]
            compute(cache, lease, int(rng.integers(0, lease.context_ids.size - lease.computed + 1)))
        elif action == 2 and waiting:
            lease = waiting.pop(rng.integers(len(waiting)))
            if lease.is_computed:
                cache.enter(lease)
                rows.append(lease.context_ids.tolist())
            else:
                cache.release(lease)
        elif action == 3 and rows and max(map(len, rows)) < CONTEXT:
            ids = rng.integers(1, 3, len(rows)).tolist()
            decode(cache, ids)
            rows = [[*row, token] for row, token in zip(rows, ids, strict=True)]
        elif action == 4 and rows:
            row = int(rng.integers(len(rows)))
            cache.leave(row)
            rows[row] = rows[-1]
            rows.pop()
        for row, ids in enumerate(rows):
            assert cache.kv[0, 1, row, 0, : len(ids), 0].tolist() == np.cumsum(ids).tolist()
        for lease in waiting:
            expected = np.cumsum(lease.context_ids[: lease.computed]).tolist()
            assert cache.kv[0, 0, lease.slot, 0, : lease.computed, 0].tolist() == expected
