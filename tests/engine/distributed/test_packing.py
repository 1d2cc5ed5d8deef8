from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pilotage.engine.distributed.packing import plan
from pilotage.types import Sample


def sample_of(sequence_id: str, length: int) -> Sample:
    return Sample(
        sequence_id=sequence_id,
        group_id="g",
        token_ids=np.ones(length, np.int32),
        loss_mask=np.arange(length) > 0,
        sampler_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        weights_versions=np.zeros(length, np.int32),
    )


def batch_of(*sizes: tuple[str, int]) -> list[Sample]:
    return [sample_of(name, length) for name, length in sizes]


def named(ranks: list[list[list[Sample]]]) -> list[list[str]]:
    return [["".join(sample.sequence_id for sample in each) for each in rank] for rank in ranks]


def test_passes_hold_rollouts_of_like_length_within_the_budget() -> None:
    samples = batch_of(("a", 10), ("b", 3), ("c", 9), ("d", 4), ("c", 2), ("e", 30))

    ranks = plan(samples, num_ranks=2, budget_tokens=30, trees=False)

    # by longest branch: b 3, d 4 (2 rows x 4 = 8); c has 2 rows of 9, so b d c are 4 x 9 = 36 > 30: c starts
    # a pass; a joins it: 3 x 10 = 30; e is alone. Three passes for two ranks: c a, the larger of the two
    # that can be divided, is. By size: e 30, c 18, a 10, b d 8; the second round goes the other way.
    assert named(ranks) == [["e", "bd"], ["cc", "a"]]


def test_a_batch_of_one_rollout_leaves_the_other_ranks_an_empty_pass() -> None:
    ranks = plan(batch_of(("a", 5), ("a", 7)), num_ranks=3, budget_tokens=8, trees=False)
    assert named(ranks) == [["aa"], [""], [""]]


def test_an_empty_batch_has_no_pass() -> None:
    assert plan([], num_ranks=2, budget_tokens=8, trees=False) == [[], []]


def tokens_of(each: list[Sample], *, trees: bool) -> int:
    if trees and each:  # all tokens are alike here, so that the longest sample holds the others
        return max(sample.token_ids.size for sample in each)
    return len(each) * max((sample.token_ids.size for sample in each), default=0)


batches = st.lists(st.tuples(st.integers(0, 12), st.integers(2, 40)), max_size=30)


@given(batches, st.integers(1, 5), st.integers(1, 120), st.booleans())
def test_every_sample_is_forwarded_once_with_its_rollout_and_no_rank_starves(
    sizes: list[tuple[int, int]], num_ranks: int, budget: int, trees: bool
) -> None:
    samples = batch_of(*((str(name), length) for name, length in sizes))

    ranks = plan(samples, num_ranks=num_ranks, budget_tokens=budget, trees=trees)

    passes = [each for rank in ranks for each in rank]
    assert sorted(id(sample) for each in passes for sample in each) == sorted(map(id, samples))
    assert len({len(rank) for rank in ranks}) == 1  # as many passes on every rank
    owners = [{sample.sequence_id for sample in each} for each in passes]
    assert sum(len(names) for names in owners) == len({sample.sequence_id for sample in samples})
    for each, names in zip(passes, owners, strict=True):
        assert tokens_of(each, trees=trees) <= budget or len(names) == 1
    empty = [number for rank in ranks for number, each in enumerate(rank) if not each]
    if empty:
        assert set(empty) == {len(ranks[0]) - 1}  # in the last round only,
        assert all(len(names) <= 1 for names in owners)  # and only where nothing more can be divided


@given(batches, st.integers(1, 4), st.booleans())
def test_the_ranks_of_a_round_forward_passes_of_neighbouring_size(
    sizes: list[tuple[int, int]], num_ranks: int, trees: bool
) -> None:
    if trees:  # what branches share is only estimated
        sizes = list(dict(sizes).items())
    samples = batch_of(*((str(name), length) for name, length in sizes))

    ranks = plan(samples, num_ranks=num_ranks, budget_tokens=60, trees=trees)

    rounds = [
        sorted(tokens_of(rank[number], trees=trees) for rank in ranks) for number in range(len(ranks[0]))
    ]
    assert all(later[-1] <= earlier[0] for earlier, later in pairwise(rounds))
