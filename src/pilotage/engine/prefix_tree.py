"""Samples of a batch as one tree of tokens, so that a prefix that several share is computed once.

All samples of a step share the system prompt, those of a group the task, branches of a rollout their common
turns. A token's hidden state depends on the tokens before it and on nothing else, so where two samples agree
from the start it is the same number. The tree is packed into one row: node after node, depth first, each
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
class Span:
    """A node: tokens that exactly the same samples have in common, as a piece of the packed row."""

    start: int
    end: int
    end_below: int
    """Where what is below the node ends, which begins at `end`; `end` itself for a leaf."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """A packed row of T tokens.

    What follows the last trained token of a sample is not in it, nor is that token itself: nothing is
    predicted from them.
    """

    token_ids_T: _Indices
    positions_T: _Indices
    spans: tuple[Span, ...]
    """The nodes in the order of the row: depth first, each before what is below it."""
    predictors_n: _Indices
    """For every trained token, sample after sample, where in the row the token before it is."""
    targets_n: _Indices
    """The trained tokens' ids."""

    @classmethod
    def of(cls, ids: Sequence[TokenIds], masks: Sequence[Mask]) -> "PrefixTree":
        """Merge sequences, each with at least one trained token, none of them its first."""
        contexts = [array[: int(mask.nonzero()[0][-1])] for array, mask in zip(ids, masks, strict=True)]
        places: list[_Indices] = [np.zeros(context.size, np.int64) for context in contexts]
        starts: list[tuple[int, int]] = []
        tokens: list[TokenIds] = []
        positions: list[_Indices] = []
        size = 0
        order = sorted(range(len(contexts)), key=lambda index: sort_key(contexts[index]))
        pending: list[tuple[list[int], int]] = [(order, 0)]
        while pending:
            members, depth = pending.pop()
            first, last = contexts[members[0]], contexts[members[-1]]
            end = shared_size(first, last)  # in sorted order nobody in between differs earlier
            if end > depth:
                span = np.arange(size, size + end - depth)
                for member in members:
                    places[member][depth:end] = span
                tokens.append(first[depth:end])
                positions.append(np.arange(depth, end))
                starts.append((size, depth))
                size += end - depth
            pending += [(group, end) for group in _by_next_token(contexts, members, end)]
        return cls(
            token_ids_T=np.concatenate(tokens).astype(np.int64),
            positions_T=np.concatenate(positions),
            spans=_spans(starts, size),
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
    def read_R(self) -> _Indices:
        """Where in the row a trained token follows, in at least one sample; ascending."""
        return np.unique(self.predictors_n)

    @cached_property
    def ends_below_T(self) -> _Indices:
        """For each token, where the tokens that may see it end."""
        return np.repeat([s.end_below for s in self.spans], [s.end - s.start for s in self.spans])


def sort_key(token_ids: TokenIds) -> bytes:
    """Return what orders sequences by their tokens, so that those that agree longest are neighbours."""
    return token_ids.astype(">i4").tobytes()


def shared_size(one: TokenIds, other: TokenIds) -> int:
    """Return how many leading tokens two sequences have in common."""
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _spans(starts: Sequence[tuple[int, int]], size: int) -> tuple[Span, ...]:
    """Return nodes from where each starts in the row and in its samples; the row has `size` tokens."""
    spans: list[Span] = []
    following: list[tuple[int, int]] = [(size, -1)]
    end = size
    for start, depth in reversed(starts):
        while following[-1][1] > depth:  # what starts deeper is below this node
            following.pop()
        spans.append(Span(start=start, end=end, end_below=following[-1][0]))
        following.append((start, depth))
        end = start
    return tuple(reversed(spans))


def _by_next_token(contexts: Sequence[TokenIds], members: Sequence[int], depth: int) -> list[list[int]]:
    """Group sorted sequences by their token at `depth`; those that end there are left out."""
    groups: dict[int, list[int]] = {}
    for member in members:
        if contexts[member].size > depth:
            groups.setdefault(int(contexts[member][depth]), []).append(member)
    return list(groups.values())
