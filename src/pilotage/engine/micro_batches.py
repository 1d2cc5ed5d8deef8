"""How a batch is split into forward passes: whole rollouts, under a budget of tokens.

A pass holds whole rollouts, because GSPO's ratio is one number a rollout. It is a prefix tree where the
layers allow it, and rows padded to the longest where they do not; rows are not laid end to end, because a
recurrent layer would carry its state from one into the next. The split depends on the batch alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotage.engine.prefix_tree import shared_size, sort_key
from pilotage.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassRollout:
    """The samples of one rollout, and what they cost in a pass."""

    samples: tuple[Sample, ...]
    alone: int
    """Distinct tokens."""
    following: int
    """Distinct tokens that are not in the rollout before it, in the order of trees."""
    longest: int
    """Length of its longest sample."""


type Pass = list[PassRollout]


def passes(samples: Sequence[Sample], *, budget_tokens: int, trees: bool) -> list[Pass]:
    """Fill one pass after the other up to the budget. A rollout that is larger makes a pass of its own.

    Args:
        budget_tokens: see `cost`.
        trees: whether passes are prefix trees. Then rollouts whose tokens agree longest come together, else
            those of like length, so that little is padded.
    """
    made: list[Pass] = []
    for rollout in _in_order(samples, trees=trees):
        if not made or cost([*made[-1], rollout], trees=trees) > budget_tokens:
            made.append([])
        made[-1].append(rollout)
    return made


def cost(rollouts: Pass, *, trees: bool) -> int:
    """Return the tokens of a pass: about the distinct ones of a tree, or those of padded rows."""
    if not rollouts:
        return 0
    if trees:
        return rollouts[0].alone + sum(rollout.following for rollout in rollouts[1:])
    return sum(len(rollout.samples) for rollout in rollouts) * max(rollout.longest for rollout in rollouts)


def samples_of(rollouts: Pass) -> list[Sample]:
    """Return what a pass forwards."""
    return [sample for rollout in rollouts for sample in rollout.samples]


def _in_order(samples: Sequence[Sample], *, trees: bool) -> list[PassRollout]:
    branches_of: dict[str, list[Sample]] = {}
    for sample in samples:
        branches_of.setdefault(sample.sequence_id, []).append(sample)
    if trees:
        for branches in branches_of.values():
            branches.sort(key=_by_tokens)
        ordered = sorted(branches_of.values(), key=lambda branches: _by_tokens(branches[0]))
    else:
        ordered = sorted(branches_of.values(), key=_longest)
    rollouts: list[PassRollout] = []
    before: Sample | None = None
    for branches in ordered:
        sizes = [sample.token_ids.size for sample in branches]
        repeated = [_shared(one, other) for one, other in zip([before, *branches], branches, strict=False)]
        rollouts.append(
            PassRollout(
                samples=tuple(branches),
                alone=sum(sizes) - sum(repeated[1:]),
                following=sum(sizes) - sum(repeated),
                longest=max(sizes),
            )
        )
        before = branches[-1]
    return rollouts


def _by_tokens(sample: Sample) -> bytes:
    return sort_key(sample.token_ids)


def _longest(branches: Sequence[Sample]) -> int:
    return max(sample.token_ids.size for sample in branches)


def _shared(one: Sample | None, other: Sample) -> int:
    return 0 if one is None else shared_size(one.token_ids, other.token_ids)
