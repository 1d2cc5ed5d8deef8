"""Which rank forwards which samples, and in how many passes. Pure, and the same on every machine.

Ranks of a sharded model gather weights together, so they must all run the same number of passes, and a pass
lasts as long as its slowest rank.
"""

from collections.abc import Sequence

from pilotage.engine.micro_batches import Pass, cost, passes, samples_of
from pilotage.types import Sample


def plan(
    samples: Sequence[Sample], *, num_ranks: int, budget_tokens: int, trees: bool
) -> list[list[list[Sample]]]:
    """Divide a batch among ranks.

    Args:
        budget_tokens: tokens of one pass of one rank; see `micro_batches.cost`.
        trees: whether passes are prefix trees.

    Returns:
        [num_ranks] equally long lists of passes. Every sample is in one of them, with all others of its
        rollout. No pass is empty while another could still be divided, and empty ones are in the last round.
        It depends on the batch alone.
    """
    pieces = passes(samples, budget_tokens=budget_tokens, trees=trees)
    while len(pieces) % num_ranks and _halve_largest(pieces, trees=trees):
        pass
    pieces.sort(key=lambda piece: cost(piece, trees=trees), reverse=True)
    rounds = [pieces[start : start + num_ranks] for start in range(0, len(pieces), num_ranks)]
    ranks: list[list[list[Sample]]] = [[] for _ in range(num_ranks)]
    for number, of_round in enumerate(rounds):
        filled = [*of_round, *([] for _ in range(num_ranks - len(of_round)))]
        # The larger pieces of a round go to the other end each time, so that totals stay close.
        for rank, piece in zip(ranks, filled if number % 2 == 0 else reversed(filled), strict=True):
            rank.append(samples_of(piece))
    return ranks


def _halve_largest(pieces: list[Pass], *, trees: bool) -> bool:
    """Divide the largest piece that holds two rollouts or more; False where none does."""
    divisible = [piece for piece in pieces if len(piece) > 1]
    if not divisible:
        return False
    largest = max(divisible, key=lambda piece: cost(piece, trees=trees))
    middle = len(largest) // 2
    pieces.append(largest[middle:])
    del largest[middle:]
    return True
