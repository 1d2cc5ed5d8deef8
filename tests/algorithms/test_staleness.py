"""Tokens too many versions back are masked, and the ledger says so."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pilotage.algorithms import StepBatch, mask_stale
from pilotage.types import Ledger, Sample


def sample_of(sequence_id: str, versions: list[int]) -> Sample:
    """A first token of context, then trained tokens of these versions; -1 is a token of a tool."""
    mask = np.array([False, *(version >= 0 for version in versions)])
    return Sample(
        sequence_id=sequence_id,
        group_id=sequence_id[0],
        token_ids=np.arange(mask.size, dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, np.float32(2), np.float32(0)),
        weights_versions=np.array([-1, *versions], np.int32),
    )


def batch_of(*samples: Sample, dropped: int = 3) -> StepBatch:
    trained = sum(sample.trained_tokens for sample in samples)
    ledger = Ledger(
        sampled_tokens=trained + dropped, trained_tokens=trained, dropped_tokens={"no_spread": dropped}
    )
    return StepBatch(
        samples=samples,
        ledger=ledger,
        num_groups=3,
        num_groups_trained=len({sample.group_id for sample in samples}),
        num_groups_too_small=0,
        num_groups_without_spread=0,
        num_groups_filtered=0,
        advantages={},
    )


def test_only_tokens_beyond_the_limit_are_masked_and_a_sample_without_a_token_is_left_out() -> None:
    batch = batch_of(sample_of("a1", [3, -1, 5]), sample_of("b1", [2, 3]))
    masked = mask_stale(batch, trainer_version=6, max_lag=2)
    [left] = masked.samples
    assert left.sequence_id == "a1"
    assert left.loss_mask.tolist() == [False, False, False, True]
    assert left.sampler_logprobs.tolist() == [0, 0, 0, -1]
    assert left.advantages.tolist() == [0, 0, 0, 2]
    assert left.weights_versions.tolist() == [-1, -1, -1, 5]
    assert masked.num_groups_trained == 1
    assert masked.ledger == Ledger(
        sampled_tokens=7, trained_tokens=1, masked_tokens={"stale": 3}, dropped_tokens={"no_spread": 3}
    )


versions = st.lists(st.integers(-1, 9), min_size=1, max_size=6).filter(lambda found: max(found) >= 0)


@given(st.lists(versions, min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_what_is_left_is_what_the_limit_allows_and_newer_weights_are_never_stale(
    rows: list[list[int]], trainer_version: int, max_lag: int
) -> None:
    batch = batch_of(*(sample_of(f"{index}", row) for index, row in enumerate(rows)))
    masked = mask_stale(batch, trainer_version=trainer_version, max_lag=max_lag)
    wanted = [v for row in rows for v in row if v >= 0 and trainer_version - v <= max_lag]
    left = [v for s in masked.samples for v in s.weights_versions[s.loss_mask].tolist()]
    assert left == wanted
    assert masked.ledger.trained_tokens == len(wanted)
    assert masked is batch or len(wanted) < batch.ledger.trained_tokens
