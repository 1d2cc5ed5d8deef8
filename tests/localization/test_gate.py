import pytest

from pilotage.localization import Submission, submission_fault


@pytest.mark.parametrize(
    ("submission", "fault"),
    [
        (Submission(hand_ins=1, last_turn_calls=1, is_cut_off=False), ""),
        (Submission(hand_ins=0, last_turn_calls=0, is_cut_off=False), "nothing handed in"),
        (Submission(hand_ins=2, last_turn_calls=2, is_cut_off=False), "handed in 2 times"),
        (Submission(hand_ins=1, last_turn_calls=3, is_cut_off=False), "handed in beside 2 other calls"),
        (Submission(hand_ins=1, last_turn_calls=1, is_cut_off=True), "the hand-in was cut off"),
    ],
)
def test_one_hand_in_alone_in_a_whole_last_turn_passes(submission: Submission, fault: str) -> None:
    assert submission_fault(submission) == fault
