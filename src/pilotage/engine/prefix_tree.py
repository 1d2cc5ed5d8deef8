"""Samples of a batch as one tree of tokens, so that a prefix that several share is computed once.

All samples of a step share the system prompt, those of a group the task, branches of a rollout their common
turns. A token's hidden state depends on the tokens before it and on nothing else, so where two samples agree
from the start it is the same number. The tree is packed into one row: node after node, parents first, each
token at the position that it has in its samples. A token sees its node up to itself and the nodes above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pilotage.types import Mask, TokenIds

type _Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Tokens that exactly the same samples have in common, as a piece of the packed row."""

    size: int
    path: tuple[int, ...]
    """The nodes above it, the root first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """A packed row of T tokens.

    What follows the last trained token of a sample is not in it, nor is that token itself: nothing is
    predicted from them.
    """

    token_ids_T: _Indices
    positions_T: _Indices
    nodes: tuple[Node, ...]
    predictors_n: _Indices
    """For every trained token, sample after sample, where in the row the token before it is."""
    targets_n: _Indices
    """The trained tokens' ids."""

    @classmethod
    def of(cls, ids: Sequence[TokenIds], masks: Sequence[Mask]) -> "PrefixTree":
        """Merge sequences, each with at least one trained token, none of them its first."""
        contexts = [array[: int(mask.nonzero()[0][-1])] for array, mask in zip(ids, masks, strict=True)]
        places: list[_Indices] = [np.zeros(context.size, np.int64) for context in contexts]
        nodes: list[Node] = []
        tokens: list[TokenIds] = []
        positions: list[_Indices] = []
        size = 0
        order = sorted(range(len(contexts)), key=lambda index: sort_key(contexts[index]))
        pending: list[tuple[list[int], int, tuple[int, ...]]] = [(order, 0, ())]
        while pending:
            members, depth, path = pending.pop()
            first, last = contexts[members[0]], contexts[members[-1]]
            end = shared_size(first, last)  # in sorted order nobody in between differs earlier
            if end > depth:
                span = np.arange(size, size + end - depth)
                for member in members:
                    places[member][depth:end] = span
                tokens.append(first[depth:end])
                positions.append(np.arange(depth, end))
                size += end - depth
                path = (*path, len(nodes))
                nodes.append(Node(size=end - depth, path=path[:-1]))
            pending += [(group, end, path) for group in _by_next_token(contexts, members, end)]
        return cls(
            token_ids_T=np.concatenate(tokens).astype(np.int64),
            positions_T=np.concatenate(positions),
            nodes=tuple(nodes),
            predictors_n=np.concatenate(
                [place[mask.nonzero()[0] - 1] for place, mask in zip(places, masks, strict=True)]
            ),
            targets_n=np.concatenate([array[mask] for array, mask in zip(ids, masks, strict=True)]).astype(
                np.int64
            ),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are forwarded."""
        return self.token_ids_T.size

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each node."""
        return [node.size for node in self.nodes]


def sort_key(token_ids: TokenIds) -> bytes:
    """Return what orders sequences by their tokens, so that those that agree longest are neighbours."""
    return token_ids.astype(">i4").tobytes()


def shared_size(one: TokenIds, other: TokenIds) -> int:
    """Return how many leading tokens two sequences have in common."""
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _by_next_token(contexts: Sequence[TokenIds], members: Sequence[int], depth: int) -> list[list[int]]:
    """Group sorted sequences by their token at `depth`; those that end there are left out."""
    groups: dict[int, list[int]] = {}
    for member in members:
        if contexts[member].size > depth:
            groups.setdefault(int(contexts[member][depth]), []).append(member)
    return list(groups.values())
