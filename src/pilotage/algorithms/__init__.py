"""Advantages, credit, losses: pure functions on numpy arrays, in float64.

Invariant: every sampled token of a step is trained once, masked with a reason or dropped with a reason, and
the ledger says which. Nothing here samples, trains, waits or reads a file, and nothing needs torch.
"""

from pilotage.algorithms.advantages import group_relative, has_spread
from pilotage.algorithms.credit import to_samples
from pilotage.algorithms.gap import LogprobGap, logprob_gap
from pilotage.algorithms.groups import BatchRules, StepBatch, build_batch
from pilotage.algorithms.losses import LossValue, TrainedTokens, policy_loss
from pilotage.algorithms.per_sample import aligned, in_order, split_trained
from pilotage.algorithms.staleness import mask_stale
from pilotage.algorithms.versions import WeightsVersions

__all__ = [
    "BatchRules",
    "LogprobGap",
    "LossValue",
    "StepBatch",
    "TrainedTokens",
    "WeightsVersions",
    "aligned",
    "build_batch",
    "group_relative",
    "has_spread",
    "in_order",
    "logprob_gap",
    "mask_stale",
    "policy_loss",
    "split_trained",
    "to_samples",
]
