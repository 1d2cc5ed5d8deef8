"""Which group of rollouts starts when, and which groups make the next batch. Pure: no clock, no tasks.

Groups are numbered along the endless row of `requests`. A group that starts after s steps is trained, at the
earliest, in step s + 1; its lag is the number of steps between. With `max_lag` L the groups of a step and of
the L steps after it may be under way at once, so that rollouts go on while the trainer works. With L = 0 the
groups of a step start when the step before it is done: the synchronous loop.

A batch is the groups that must be trained soonest, among those that are finished. It waits for a straggler
only where, without it, some group could not be trained in time any more, whatever finished meanwhile.
Invariant (`Stragglers.WAIT`): no group is trained more than L steps after it started; a batch that waits for
all groups under way can always be made, so waiting ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Stragglers(StrEnum):
    """What becomes of groups that take longer than the lag limit allows."""

    WAIT = "wait"
    """The trainer waits for them."""
    MASK = "mask"
    """They are trained when they come, without the tokens that are older than the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run has come along the row of groups."""

    steps_done: int = 0
    next_group: int = 0
    """Every group before it has been trained or set aside ..."""
    ahead: frozenset[int] = frozenset()
    """... and so have these, which overtook it."""


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Groups under way, groups finished, and what may happen next."""

    per_step: int
    """Groups of a batch."""
    num_steps: int
    max_lag: int
    stragglers: Stragglers
    position: Position
    _next: int = field(init=False)
    """No group from here on has started."""
    _open: dict[int, int] = field(init=False, default_factory=dict[int, int])
    """The last step that may train it, of each group under way."""
    _ready: dict[int, int] = field(init=False, default_factory=dict[int, int])
    """The same of finished groups that count."""
    _set_aside: set[int] = field(init=False, default_factory=set[int])
    """Finished groups that count for no batch; the next one reports them."""
    _training: tuple[int, ...] = field(init=False, default=())
    _counting: int = field(init=False, default=0)
    """Groups of the batch that is being trained, without those set aside."""
    _is_resumed: bool = field(init=False)
    """Whether no step has been done since the run was taken up again."""
    _num_resumed: int = field(init=False, default=0)
    """Groups started meanwhile."""

    def __post_init__(self) -> None:
        self._next = self.position.next_group
        self._is_resumed = self.position.steps_done > 0

    @property
    def num_open(self) -> int:
        """Groups under way."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Finished groups that no batch has yet."""
        return len(self._ready)

    @property
    def set_aside_in_a_row(self) -> int:
        """Groups set aside since the last batch."""
        return len(self._set_aside)

    def start(self) -> int | None:
        """Start the next group and return its number; None where none may start now."""
        steps = min(self.max_lag + 1, self.num_steps - self.position.steps_done)
        if len(self._open) + len(self._ready) + self._counting >= steps * self.per_step:
            return None
        while self._next in self.position.ahead:
            self._next += 1
        number = self._next
        self._next += 1
        self._open[number] = self._deadline()
        return number

    def finish(self, number: int, *, counts: bool) -> None:
        """A group's rollouts have all ended.

        Args:
            counts: whether it fills a place in a batch; the next group takes the place of one that does not.
        """
        deadline = self._open.pop(number)
        if counts:
            self._ready[number] = deadline
        else:
            self._set_aside.add(number)

    def take(self) -> tuple[int, ...] | None:
        """Return the groups of the next batch, those set aside included; None where it must wait."""
        ordered = sorted(self._ready, key=lambda number: (self._ready[number], number))
        chosen, left = ordered[: self.per_step], ordered[self.per_step :]
        if len(chosen) < self.per_step:
            return None
        if self.stragglers is Stragglers.WAIT:
            others = [self._ready[number] for number in left] + list(self._open.values())
            if not self._fits(sorted(others)):
                return None
        for number in chosen:
            del self._ready[number]
        self._training = tuple(sorted({*chosen, *self._set_aside}))
        self._counting = len(chosen)
        self._set_aside.clear()
        return self._training

    def finish_step(self) -> None:
        """The batch has been trained."""
        self.position = _moved(self.position, self._training)
        self._training, self._counting = (), 0
        self._is_resumed = False

    def _deadline(self) -> int:
        """Return the last step that may train a group that starts now.

        Taken up again, a run has rollouts of groups that had started before, in order of their numbers, when
        it still held for each that it could be trained in time: one batch after the other can.
        """
        if self._is_resumed:
            self._num_resumed += 1
            return self.position.steps_done + 1 + (self._num_resumed - 1) // self.per_step
        return self.position.steps_done + self.max_lag + 1

    def _fits(self, deadlines: Sequence[int]) -> bool:
        """Whether groups with these deadlines, in order, can all be trained in time after the next step."""
        first = self.position.steps_done + 2
        return all(first + index // self.per_step <= deadline for index, deadline in enumerate(deadlines))


def _moved(position: Position, trained: Iterable[int]) -> Position:
    ahead = {*position.ahead, *trained}
    cursor = position.next_group
    while cursor in ahead:
        ahead.remove(cursor)
        cursor += 1
    return Position(steps_done=position.steps_done + 1, next_group=cursor, ahead=frozenset(ahead))
