"""How a batch is split into the forward passes of a trainer on one device: whole rollouts, under a budget.

A pass holds whole rollouts, because GSPO's ratio is one number a rollout.
"""

from collections.abc import Sequence

from pilotage.engine.prefix_tree import shared_size, sort_key
from pilotage.types import Sample


def split(samples: Sequence[Sample], *, budget_tokens: int) -> list[list[Sample]]:
    """Split a batch into micro-batches of whole rollouts, each about `budget_tokens` padded tokens.

    Rollouts of like length come together, so that little is padded. One rollout larger than the budget
    makes a micro-batch of its own. The order depends on the batch alone.
    """
    micro_batches: list[list[Sample]] = []
    num_samples = longest = 0
    for rollout in sorted(_rollouts(samples), key=lambda branches: max(s.token_ids.size for s in branches)):
        longest = max(longest, *(sample.token_ids.size for sample in rollout))
        num_samples += len(rollout)
        if not micro_batches or num_samples * longest > budget_tokens:
            micro_batches.append([])
            num_samples, longest = len(rollout), max(sample.token_ids.size for sample in rollout)
        micro_batches[-1] += rollout
    return micro_batches


def pack(samples: Sequence[Sample], *, budget_tokens: int) -> list[list[Sample]]:
    """Split a batch into packs of whole rollouts, each of about `budget_tokens` distinct tokens.

    Rollouts whose tokens agree longest come together. A rollout larger than the budget makes a pack of its
    own. The order depends on the batch alone.
    """
    rollouts = _rollouts(samples)
    for branches in rollouts:
        branches.sort(key=lambda sample: sort_key(sample.token_ids))
    packs: list[list[Sample]] = []
    filled = 0
    for branches in sorted(rollouts, key=lambda branches: sort_key(branches[0].token_ids)):
        added = _distinct(branches, packs[-1][-1] if packs else None)
        if not packs or filled + added > budget_tokens:
            packs.append([])
            filled, added = 0, _distinct(branches, None)
        packs[-1] += branches
        filled += added
    return packs


def _distinct(branches: Sequence[Sample], before: Sample | None) -> int:
    """Return about how many tokens sorted samples add to a pack that ends with `before`."""
    count = 0
    for sample in branches:
        shared = 0 if before is None else shared_size(before.token_ids, sample.token_ids)
        count += sample.token_ids.size - shared
        before = sample
    return count


def _rollouts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each rollout, in the order of the batch."""
    rollouts: dict[str, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.sequence_id, []).append(sample)
    return list(rollouts.values())
