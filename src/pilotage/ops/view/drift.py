"""Where a branch left what was recorded before, as a diff of text."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pilotage.types import TokenIds, Trajectory

type Decode = Callable[[TokenIds], str]

_MOST_LINES = 1500
"""Lines of each side that are compared: a diff takes time quadratic in them."""
_AROUND_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What an earlier branch went on with, and what this one went on with."""

    earlier_turn: int
    """First turn of the branch that is compared with."""
    shared_tokens: int
    """Ids that both branches go on with before they differ."""
    lines: tuple[tuple[str, str], ...]
    """(`=`, `-` earlier, `+` here, or `~` for a stretch that is left out; text) of each line."""
    note: str


def drift_of(trajectory: Trajectory, index: int, decode: Decode) -> Drift | None:
    """Compare a turn that starts a branch with the newest earlier turn that had the same parent."""
    turn = trajectory.turns[index]
    earlier = [at for at in range(index) if trajectory.turns[at].parent == turn.parent]
    if turn.branch_cause is None or not earlier:
        return None
    old_ids = _continuation(trajectory, earlier[-1], before=index)
    new_ids = turn.context_ids
    shortest = min(old_ids.size, new_ids.size)
    differs = np.flatnonzero(old_ids[:shortest] != new_ids[:shortest])
    shared = int(differs[0]) if differs.size else shortest
    old, new = decode(old_ids), decode(new_ids)
    note = ""
    if old == new and not np.array_equal(old_ids, new_ids):
        note = "same text, other tokens"
    elif old.startswith(new):
        note = "nothing was rewritten: the same context was sampled again"
    elif max(old.count("\n"), new.count("\n")) > _MOST_LINES:
        note = f"only the first {_MOST_LINES} lines of each side are compared"
    return Drift(
        earlier_turn=earlier[-1],
        shared_tokens=shared,
        lines=tuple(_diff(old.splitlines()[:_MOST_LINES], new.splitlines()[:_MOST_LINES])),
        note=note,
    )


def _continuation(trajectory: Trajectory, first: int, *, before: int) -> TokenIds:
    """Return all ids from the context of `first` to the end of its newest branch before `before`."""
    below = {first}
    newest = first
    for at in range(first + 1, before):
        if trajectory.turns[at].parent in below:
            below.add(at)
            newest = at
    path = [at for at in trajectory.path(newest) if at in below]
    turns = [trajectory.turns[at] for at in path]
    return np.concatenate([part for turn in turns for part in (turn.context_ids, turn.completion_ids)])


def _diff(old: list[str], new: list[str]) -> list[tuple[str, str]]:
    """Return the lines that differ, with a few around them."""
    lines: list[tuple[str, str]] = []
    for tag, old_start, old_end, new_start, new_end in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            lines += _shortened(old[old_start:old_end], is_first=not lines, is_last=old_end == len(old))
            continue
        lines += [("-", line) for line in old[old_start:old_end]]
        lines += [("+", line) for line in new[new_start:new_end]]
    return lines


def _shortened(same: list[str], *, is_first: bool, is_last: bool) -> list[tuple[str, str]]:
    head = [] if is_first else same[:_AROUND_LINES]
    tail = [] if is_last else same[-_AROUND_LINES:]
    if len(same) <= len(head) + len(tail):
        return [("=", line) for line in same]
    left_out = len(same) - len(head) - len(tail)
    return [
        *(("=", line) for line in head),
        ("~", f"{left_out} equal lines"),
        *(("=", line) for line in tail),
    ]
