"""The recorded turns of one session, and where a request belongs among them.

A node is a turn, or the root of one set of tools. The edge to a turn is named by the digests of the
messages that the turn added; past the edge the request must repeat the turn's reply in some spelling.
Matching walks these edges, so it costs one look-up a turn, and memory grows with the messages added.

Invariant: leaves = 1 + turns that carry a branch cause, once a turn is recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pilotage.proxy.canonical import CanonicalReply
from pilotage.proxy.requests import TurnRequest
from pilotage.types import BranchCause, Message, Role, TokenIds, Trajectory, Turn

type _Node = int | bytes
"""A turn's index, or the digest of the tools that a root was rendered with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Where a request hangs."""

    parent: int | None
    """The recorded turn whose sequence the prompt extends."""
    num_matched: int
    """Messages of the request that the parent's sequence already holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one turn answered, as the agent sees it."""

    message: Message
    canonical: CanonicalReply


@dataclass(slots=True, kw_only=True)
class _Edges:
    """The turns that extend one node."""

    turns_at: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Digests of the added messages -> turns, oldest first."""
    num_messages: set[int] = field(default_factory=set[int])
    """How many messages those keys hold; nearly always a single number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is kept of a turn's request, to name branches: nothing of its text."""

    node: _Node
    tools_digest: bytes
    span: bytes
    num_messages: int
    conversation_hint: str


class SessionTree:
    """Records turns and finds, for a request, the longest recorded conversation that it continues."""

    def __init__(self, *, honour_dropped_reasoning: bool = False) -> None:
        self._honour_dropped_reasoning = honour_dropped_reasoning
        self._turns: list[Turn] = []
        self._replies: list[Reply] = []
        self._requests: list[_Request] = []
        self._prompt_tokens: list[int] = []
        self._edges: dict[_Node, _Edges] = {}
        self._newest_of_key: dict[bytes, int] = {}
        self._newest_digests = b""
        """Digests of the newest turn's whole request: most requests repeat it."""

    def __len__(self) -> int:
        return len(self._turns)

    def attach(self, request: TurnRequest) -> Attachment:
        """Return the deepest turn whose conversation `request` repeats, the newest among equals."""
        if self._continues_newest(request):
            return Attachment(parent=len(self._turns) - 1, num_matched=self._requests[-1].num_messages + 1)
        best = Attachment(parent=None, num_matched=0)
        open_ends: list[tuple[_Node, int]] = [(request.tools.digest, 0)]
        while open_ends:
            node, start = open_ends.pop()
            for turn, end in self._steps(node, start, request):
                open_ends.append((turn, end))
                if self._rank(turn, end) > self._rank(best.parent, best.num_matched):
                    best = Attachment(parent=turn, num_matched=end)
        return best

    def prompt_ids(self, parent: int | None, suffix_ids: TokenIds) -> TokenIds:
        """Return the recorded sequence that ends with turn `parent`, then `suffix_ids`, as one array."""
        parts = [suffix_ids]
        at = parent
        while at is not None:
            turn = self._turns[at]
            parts += [turn.completion_ids, turn.context_ids]
            at = turn.parent
        return np.concatenate(parts[::-1])

    def prompt_ids_of(self, index: int) -> TokenIds:
        """Return the ids that the sampler was given at a recorded turn."""
        turn = self._turns[index]
        return self.prompt_ids(turn.parent, turn.context_ids)

    def last_id(self, turn: int) -> int:
        """Return the last id of the sequence that ends with `turn`."""
        return int(self._turns[turn].completion_ids[-1])

    def record(self, turn: Turn, reply: Reply, request: TurnRequest, num_matched: int) -> int:
        """Add a turn with the cause of its branch, if it starts one; returns its index."""
        index = len(self._turns)
        node: _Node = request.tools.digest if turn.parent is None else turn.parent
        span = request.span(num_matched, len(request.messages))
        self._turns.append(replace(turn, branch_cause=self._branch_cause(node, span, request)))
        self._replies.append(reply)
        self._requests.append(
            _Request(
                node=node,
                tools_digest=request.tools.digest,
                span=span,
                num_messages=len(request.messages),
                conversation_hint=request.conversation_hint,
            )
        )
        before = 0 if turn.parent is None else self.sequence_tokens(turn.parent)
        self._prompt_tokens.append(before + turn.context_ids.size)
        edges = self._edges.setdefault(node, _Edges())
        edges.turns_at.setdefault(span, []).append(index)
        edges.num_messages.add(len(request.messages) - num_matched)
        self._newest_of_key[request.key] = index
        self._newest_digests = request.digests
        return index

    def deliver(self, index: int) -> None:
        """Note that the answer of a turn went out over an open connection."""
        if not self._turns[index].is_delivered:
            self._turns[index] = replace(self._turns[index], is_delivered=True)

    def newest_answer(self, request: TurnRequest) -> int | None:
        """Return the newest turn that answered this very prompt, or None."""
        return self._newest_of_key.get(request.key)

    def turn(self, index: int) -> Turn:
        """Return one recorded turn."""
        return self._turns[index]

    def reply(self, index: int) -> Reply:
        """Return what one turn answered."""
        return self._replies[index]

    def prompt_tokens(self, index: int) -> int:
        """Return the length of the prompt that the sampler was given at a turn."""
        return self._prompt_tokens[index]

    def sequence_tokens(self, index: int) -> int:
        """Return the length of a turn's prompt and completion."""
        return self._prompt_tokens[index] + self._turns[index].completion_ids.size

    def trajectory(self) -> Trajectory:
        """Return everything recorded so far."""
        return Trajectory(turns=tuple(self._turns))

    def _continues_newest(self, request: TurnRequest) -> bool:
        """Decide the usual case with one comparison, where the walk would come to the same end.

        The newest turn has no children, so nothing is deeper, unless a sibling of the same edge has.
        """
        if not self._turns or not request.digests.startswith(self._newest_digests):
            return False
        newest = self._requests[-1]
        sent = request.reply_at(newest.num_messages)
        return (
            sent is not None
            and request.tools.digest == newest.tools_digest
            and len(self._edges[newest.node].turns_at[newest.span]) == 1
            and self._is_repeated(len(self._turns) - 1, sent)
        )

    def _steps(self, node: _Node, start: int, request: TurnRequest) -> list[tuple[int, int]]:
        """Return (turn, messages matched with it) for every turn one edge below `node`."""
        edges = self._edges.get(node)
        steps: list[tuple[int, int]] = []
        for length in edges.num_messages if edges else ():
            sent = request.reply_at(start + length)
            if edges is None or sent is None:
                continue
            for turn in edges.turns_at.get(request.span(start, start + length), ()):
                if self._is_repeated(turn, sent):
                    steps.append((turn, start + length + 1))
        return steps

    def _is_repeated(self, turn: int, sent: CanonicalReply) -> bool:
        recorded = self._replies[turn].canonical
        if not recorded.says_the_same(sent):
            return False
        if not sent.reasoning:
            return not (recorded.reasoning and self._honour_dropped_reasoning)
        return sent.reasoning == recorded.reasoning

    def _rank(self, turn: int | None, num_matched: int) -> tuple[int, bool, int]:
        """Longest match first, then one that the agent has seen, then the newest."""
        if turn is None:
            return (num_matched, False, -1)
        return (num_matched, self._turns[turn].is_delivered, turn)

    def _branch_cause(self, node: _Node, span: bytes, request: TurnRequest) -> BranchCause | None:
        """Return why `request` starts a branch at `node`, or None where it extends a leaf."""
        edges = self._edges.get(node)
        if not self._turns or (edges is None and isinstance(node, int)):
            return None
        if self._is_new_conversation(request):
            return BranchCause.NEW_CONVERSATION
        if edges is not None and span in edges.turns_at:
            return BranchCause.RETRY
        if isinstance(node, bytes) and self._has_other_tools(node, request):
            return BranchCause.TOOLS_CHANGED
        return self._cause_by_history(node, request)

    def _is_new_conversation(self, request: TurnRequest) -> bool:
        hint, opening = request.conversation_hint, _opening(request)
        if hint and all(known.conversation_hint != hint for known in self._requests):
            return True
        return not any(known.span.startswith(opening) for known in self._roots())

    def _has_other_tools(self, tools_digest: bytes, request: TurnRequest) -> bool:
        opening = _opening(request)
        return all(known.node != tools_digest for known in self._roots() if known.span.startswith(opening))

    def _roots(self) -> Iterator[_Request]:
        return (known for known in self._requests if isinstance(known.node, bytes))

    def _cause_by_history(self, node: _Node, request: TurnRequest) -> BranchCause:
        """Compare with the newest turn below `node`: what differs first, and whether it got shorter."""
        if self._drops_reasoning(node, request):
            return BranchCause.REASONING_DROPPED
        if len(request.messages) < self._requests[self._newest_below(node)].num_messages:
            return BranchCause.COMPACTION
        return BranchCause.HISTORY_REWRITTEN

    def _newest_below(self, node: _Node) -> int:
        below: set[_Node] = {node}
        for index, known in enumerate(self._requests):
            if known.node in below:
                below.add(index)
        return max(index for index in below if isinstance(index, int))

    def _drops_reasoning(self, node: _Node, request: TurnRequest) -> bool:
        start = 0 if isinstance(node, bytes) else self._requests[node].num_messages + 1
        edges = self._edges.get(node, _Edges())
        for length in edges.num_messages:
            sent = request.reply_at(start + length)
            turns = edges.turns_at.get(request.span(start, start + length), ())
            if sent is not None and any(self._replies[turn].canonical.says_the_same(sent) for turn in turns):
                return True
        return False


def _opening(request: TurnRequest) -> bytes:
    """Return the digests up to and with the first user message: what makes a conversation this one."""
    for index, read in enumerate(request.messages):
        if read.message.role is Role.USER:
            return request.span(0, index + 1)
    return request.digests
