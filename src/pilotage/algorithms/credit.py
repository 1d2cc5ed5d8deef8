"""From a rollout's tree of turns to flat samples.

Invariant: over the samples of one rollout, every sampled token of a delivered turn is trained exactly
once, and every sample replays, id for id, what the sampler saw. What a token is worth is decided
elsewhere.
"""

import numpy as np

from pilotage.types import Sample, Trajectory, Turn
from pilotage.types.arrays import Logprobs, Mask, Versions


def to_samples(trajectory: Trajectory, *, sequence_id: str, group_id: str, advantage: float) -> list[Sample]:
    """Flatten each branch that ends in a delivered turn into one sample.

    A token that several branches share is trained in the first of them and is context in the others.
    Turns that were never delivered are not trained; where nothing delivered follows them they are left
    out. Token 0 of a sequence is never trained: nothing predicts it. Time and memory are linear in the
    tokens of the samples.

    Example: two branches that share the first turn (upper case is sampled)

        turns              a b C D  ->  e F        samples   a b C D e F    mask  0 0 1 1 0 1
                                    ->  g H                  a b C D g H    mask  0 0 0 0 0 1
    """
    owned: set[int] = set()
    samples: list[Sample] = []
    for leaf in _delivered_leaves(trajectory):
        path = trajectory.path(leaf)
        fresh = {index for index in path if index not in owned and trajectory.turns[index].is_delivered}
        owned |= fresh
        sample = _flatten(
            [(trajectory.turns[index], index in fresh) for index in path],
            sequence_id=sequence_id,
            group_id=group_id,
            advantage=advantage,
        )
        if sample.loss_mask.any():
            samples.append(sample)
    return samples


def orphaned_tokens(trajectory: Trajectory) -> int:
    """Count the sampled tokens of turns that were never delivered."""
    return sum(turn.completion_ids.size for turn in trajectory.turns if not turn.is_delivered)


def _delivered_leaves(trajectory: Trajectory) -> list[int]:
    """Return the delivered turns that no delivered turn follows, in order."""
    leads_on: set[int] = set()
    leaves: list[int] = []
    for index in reversed(range(len(trajectory.turns))):
        turn = trajectory.turns[index]
        if turn.is_delivered and index not in leads_on:
            leaves.append(index)
        if turn.parent is not None and (turn.is_delivered or index in leads_on):
            leads_on.add(turn.parent)
    return leaves[::-1]


def _flatten(path: list[tuple[Turn, bool]], *, sequence_id: str, group_id: str, advantage: float) -> Sample:
    """Concatenate turns, root first, each with whether its completion is trained here."""
    length = sum(turn.context_ids.size + turn.completion_ids.size for turn, _ in path)
    token_ids = np.empty(length, np.int32)
    mask: Mask = np.zeros(length, np.bool_)
    logprobs: Logprobs = np.zeros(length, np.float32)
    versions: Versions = np.full(length, -1, np.int32)
    at = 0
    for turn, is_trained in path:
        start, end = at + turn.context_ids.size, at + turn.context_ids.size + turn.completion_ids.size
        token_ids[at:start] = turn.context_ids
        token_ids[start:end] = turn.completion_ids
        first = max(start, 1)
        if is_trained and first < end:
            mask[first:end] = True
            logprobs[first:end] = turn.logprobs[first - start :]
            versions[first:end] = turn.weights_versions[first - start :]
        at = end
    return Sample(
        sequence_id=sequence_id,
        group_id=group_id,
        token_ids=token_ids,
        loss_mask=mask,
        sampler_logprobs=logprobs,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        weights_versions=versions,
    )
