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


def test_passes_hold_rollouts_of_like_length_within_the_budget() -> None:
    samples = batch_of(("a", 10), ("b", 3), ("c", 9), ("d", 4), ("c", 2), ("e", 30))

    ranks = plan(samples, num_ranks=2, budget_tokens=30)

    # by longest branch: b 3, d 4 (2 rows x 4 = 8); c has 2 rows of 9, so b d c are 4 x 9 = 36 > 30: c starts
    # a pass; a joins it: 3 x 10 = 30; e is alone. Three passes for two ranks: c a, the larger of the two
    # that can be divided, is. By size: e 30, c 18, a 10, b d 8; the second round goes the other way.
    assert ranks == [[(5,), (1, 3)], [(2, 4), (0,)]]


def test_a_batch_of_one_rollout_leaves_the_other_ranks_an_empty_pass() -> None:
    assert plan(batch_of(("a", 5), ("a", 7)), num_ranks=3, budget_tokens=8) == [[(0, 1)], [()], [()]]


def test_an_empty_batch_has_no_pass() -> None:
    assert plan([], num_ranks=2, budget_tokens=8) == [[], []]


batches = st.lists(st.tuples(st.integers(0, 12), st.integers(2, 40)), max_size=30)


@given(batches, st.integers(1, 5), st.integers(1, 120))
def test_every_sample_is_forwarded_once_with_its_rollout_and_no_rank_starves(
    sizes: list[tuple[int, int]], num_ranks: int, budget: int
) -> None:
    samples = batch_of(*((str(name), length) for name, length in sizes))

    ranks = plan(samples, num_ranks=num_ranks, budget_tokens=budget)

    passes = [indices for rank in ranks for indices in rank]
    assert sorted(index for indices in passes for index in indices) == list(range(len(samples)))
    assert len({len(rank) for rank in ranks}) == 1  # as many passes on every rank
    owners = [{samples[index].sequence_id for index in indices} for indices in passes]
    assert sum(len(names) for names in owners) == len({sample.sequence_id for sample in samples})
    for indices, names in zip(passes, owners, strict=True):
        padded = len(indices) * max((samples[index].token_ids.size for index in indices), default=0)
        assert padded <= budget or len(names) == 1
    empty = [number for rank in ranks for number, indices in enumerate(rank) if not indices]
    if empty:
        assert set(empty) == {len(ranks[0]) - 1}  # in the last round only,
        assert all(len(names) <= 1 for names in owners)  # and only where nothing more can be divided


@given(batches, st.integers(1, 4))
def test_the_ranks_of_a_round_forward_passes_of_neighbouring_size(
    sizes: list[tuple[int, int]], num_ranks: int
) -> None:
    samples = batch_of(*((str(name), length) for name, length in sizes))

    ranks = plan(samples, num_ranks=num_ranks, budget_tokens=60)

    def padded(indices: tuple[int, ...]) -> int:
        return len(indices) * max((samples[index].token_ids.size for index in indices), default=0)

    rounds = [sorted(padded(rank[number]) for rank in ranks) for number in range(len(ranks[0]))]
    assert all(later[-1] <= earlier[0] for earlier, later in pairwise(rounds))
