"""A rollout's turns as a tree: every token is stored once, so memory is linear in tokens added.

Invariant: the sequence that the sampler saw at a turn is the concatenation of context and completion of
all its ancestors, then the turn's own context. Nothing here is ever decoded or encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pilotage.types.arrays import Logprobs, TokenIds, Versions, freeze, require_shape
from pilotage.types.sampling import FinishReason, SamplingParams


class BranchCause(StrEnum):
    """Why a turn starts another branch of its trajectory."""

    REASONING_DROPPED = "reasoning_dropped"
    """The agent sent the assistant message back without its reasoning."""
    HISTORY_REWRITTEN = "history_rewritten"
    """A recorded message came back with other text."""
    TOOLS_CHANGED = "tools_changed"
    """The offered tools, which are part of the prompt, differ."""
    RETRY = "retry"
    """The same request was sampled again."""
    COMPACTION = "compaction"
    """The history came back shorter: the agent summarised it."""
    NEW_CONVERSATION = "new_conversation"
    """Another first message: a sub-agent, or a title call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One sampler call: C new context tokens, then K sampled tokens. Owns its arrays.

    Example (lists stand for arrays): the second turn, after a tool wrote three tokens

        Turn(parent=0, context_ids=[8, 9, 10], completion_ids=[4, 5], logprobs=[-0.2, -1.1],
             weights_versions=[7, 7], finish_reason=FinishReason.STOP, ...)
    """

    parent: int | None
    """Index of the turn whose sequence this one extends; None where it starts from nothing."""
    branch_cause: BranchCause | None = None
    """Set iff the turn starts another branch: its parent was extended before, or it is a root but not the
    first. A trajectory has one leaf more than it has causes."""
    context_ids: TokenIds
    """[C] prompt tokens that the parent's sequence did not hold."""
    completion_ids: TokenIds
    """[K] sampled tokens, stop token included."""
    logprobs: Logprobs
    """[K] sampler log-probs, at the sampling temperature."""
    weights_versions: Versions
    """[K] weights version of each sampled token."""
    finish_reason: FinishReason
    sampling: SamplingParams
    is_delivered: bool = True
    """False where the client went away before the answer: an orphan, never trained."""
    malformed_calls: int = 0
    called_tools: tuple[str, ...] | None = None
    """Names in the calls of the completion, in order; None where its recorder did not parse it."""
    started_at: float
    """Unix seconds when the request arrived."""
    finished_at: float
    """Unix seconds when the completion was recorded."""

    def __post_init__(self) -> None:
        require_shape(
            "Turn", self.completion_ids.size, logprobs=self.logprobs, weights_versions=self.weights_versions
        )
        freeze(self.context_ids, self.completion_ids, self.logprobs, self.weights_versions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The recorded turns of one rollout, oldest first; a parent always precedes its children."""

    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(f"turn {index} names parent {turn.parent}; a parent must precede it")

    def path(self, index: int) -> list[int]:
        """Return the turn indices from the root to `index`, both included."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.turns[at].parent
        return path[::-1]

    def leaves(self) -> list[int]:
        """Return the indices of turns that no turn extends, in order; each ends one branch."""
        parents = {turn.parent for turn in self.turns}
        return [index for index in range(len(self.turns)) if index not in parents]

    def prompt_ids(self, index: int) -> TokenIds:
        """Return the ids that the sampler was given at turn `index`."""
        *ancestors, last = self.path(index)
        parts: list[TokenIds] = []
        for ancestor in ancestors:
            parts += [self.turns[ancestor].context_ids, self.turns[ancestor].completion_ids]
        return np.concatenate([*parts, self.turns[last].context_ids])

    def branch_causes(self) -> Iterator[BranchCause]:
        """Yield the cause of every branch."""
        return (turn.branch_cause for turn in self.turns if turn.branch_cause is not None)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens over all turns."""
        return sum(turn.completion_ids.size for turn in self.turns)
