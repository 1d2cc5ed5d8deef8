"""Leave out tokens that weights too far back have sampled."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pilotage.algorithms.groups import StepBatch
from pilotage.types import Ledger, Sample

STALE = "stale"
"""Masked: more versions behind than the limit of the lag."""


def mask_stale(batch: StepBatch, *, trainer_version: int, max_lag: int) -> StepBatch:
    """Mask every token that was sampled more than `max_lag` versions before the trainer's.

    Baselines and advantages stay as they are. A sample without a token left is left out.
    """
    oldest = trainer_version - max_lag
    samples = [
        _without(sample, sample.loss_mask & (sample.weights_versions < oldest)) for sample in batch.samples
    ]
    kept = tuple(sample for sample in samples if sample.loss_mask.any())
    trained = sum(sample.trained_tokens for sample in kept)
    stale = batch.ledger.trained_tokens - trained
    if not stale:
        return batch
    masked: Mapping[str, int] = {**batch.ledger.masked_tokens, STALE: stale}
    return replace(
        batch,
        samples=kept,
        num_groups_trained=len({sample.group_id for sample in kept}),
        ledger=Ledger(
            sampled_tokens=batch.ledger.sampled_tokens,
            trained_tokens=trained,
            masked_tokens=masked,
            dropped_tokens=batch.ledger.dropped_tokens,
        ),
    )


def _without(sample: Sample, is_stale: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Sample:
    if not is_stale.any():
        return sample
    mask = sample.loss_mask & ~is_stale
    zero = np.float32(0)
    return replace(
        sample,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, sample.sampler_logprobs, zero),
        advantages=np.where(mask, sample.advantages, zero),
        weights_versions=np.where(mask, sample.weights_versions, np.int32(-1)),
    )
