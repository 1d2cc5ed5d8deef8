"""The submission gate: whether a rollout handed in as it should have, after CodeScout's rule."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """How a rollout handed in."""

    hand_ins: int
    """Accepted ones, over the whole rollout."""
    last_turn_calls: int
    """Tool calls of the last turn, the hand-in among them."""
    is_cut_off: bool
    """Whether the last turn ended at its token limit and not with its end-of-turn token."""


def submission_fault(submission: Submission) -> str:
    """Return which rule the submission breaks; empty where it breaks none.

    One hand-in in the whole rollout, in a last turn that holds nothing else and came to its end.
    """
    if submission.hand_ins != 1:
        return "nothing handed in" if submission.hand_ins == 0 else f"handed in {submission.hand_ins} times"
    if submission.last_turn_calls != 1:
        return f"handed in beside {submission.last_turn_calls - 1} other calls"
    return "the hand-in was cut off" if submission.is_cut_off else ""
