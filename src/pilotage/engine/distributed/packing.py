"""Which rank forwards which samples, and in how many passes. Pure, and the same on every machine.

Ranks of a sharded model gather weights together, so they must all run the same number of passes, and a pass
lasts as long as its slowest rank. A pass holds whole rollouts, because GSPO's ratio is one number a rollout.

Rows are padded on the right, not laid end to end: a recurrent layer (gated delta rule) would carry its
state from one row into the next. Rollouts of like length share a pass, so little is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotage.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollout:
    """The samples of one rollout, by index, and the length that they are padded to."""

    samples: tuple[int, ...]
    longest: int


type MicroBatch = tuple[int, ...]
"""Indices of the samples that one rank forwards in one pass; empty where it only takes part."""


def plan(samples: Sequence[Sample], *, num_ranks: int, budget_tokens: int) -> list[list[MicroBatch]]:
    """Divide a batch among ranks.

    Args:
        budget_tokens: padded tokens of one pass of one rank. One rollout that is larger makes a pass of its
            own.

    Returns:
        [num_ranks] equally long lists of passes. Every sample is in one of them, with all others of its
        rollout. No pass is empty while another could still be divided, and empty ones are in the last round.
        It depends on the batch alone. O(B log B + B num_ranks).
    """
    pieces = _fill(_rollouts(samples), budget_tokens=budget_tokens)
    while len(pieces) % num_ranks and _halve_largest(pieces):
        pass
    pieces.sort(key=_padded_tokens, reverse=True)
    rounds = [pieces[start : start + num_ranks] for start in range(0, len(pieces), num_ranks)]
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for number, of_round in enumerate(rounds):
        filled = [*of_round, *([] for _ in range(num_ranks - len(of_round)))]
        # The larger pieces of a round go to the other end each time, so that totals stay close.
        for rank, piece in zip(ranks, filled if number % 2 == 0 else reversed(filled), strict=True):
            rank.append(tuple(index for rollout in piece for index in rollout.samples))
    return ranks


def _rollouts(samples: Sequence[Sample]) -> list[_Rollout]:
    """Group samples by rollout, shortest first."""
    indices: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        indices.setdefault(sample.sequence_id, []).append(index)
    rollouts = [
        _Rollout(samples=tuple(of_rollout), longest=max(samples[i].token_ids.size for i in of_rollout))
        for of_rollout in indices.values()
    ]
    return sorted(rollouts, key=lambda rollout: (rollout.longest, rollout.samples))


def _padded_tokens(piece: Sequence[_Rollout]) -> int:
    rows = sum(len(rollout.samples) for rollout in piece)
    return rows * max((rollout.longest for rollout in piece), default=0)


def _fill(rollouts: Sequence[_Rollout], *, budget_tokens: int) -> list[list[_Rollout]]:
    """Fill one piece after the other up to the budget; the rollouts are sorted by length."""
    pieces: list[list[_Rollout]] = []
    for rollout in rollouts:
        if not pieces or _padded_tokens([*pieces[-1], rollout]) > budget_tokens:
            pieces.append([])
        pieces[-1].append(rollout)
    return pieces


def _halve_largest(pieces: list[list[_Rollout]]) -> bool:
    """Divide the largest piece that holds two rollouts or more; False where none does."""
    divisible = [piece for piece in pieces if len(piece) > 1]
    if not divisible:
        return False
    largest = max(divisible, key=_padded_tokens)
    middle = len(largest) // 2
    pieces.append(largest[middle:])
    del largest[middle:]
    return True
