"""A run in numbers: window means, where a rise comes from, and a report that tells it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.records import make_evaluation, make_record

from pilotage.ops.report import (
    RiseShares,
    WindowMean,
    format_report,
    rise_shares,
    totals,
    training_steps,
    window_means,
)

RUN = [
    {**make_evaluation(0, 0.5), "eval/reward_ci95": 0.125},
    make_record(1, 1.0, **{"branch/retry": 2}),
    make_record(2, 2.0, completed=2, **{"outcome/stuck": 2}),
    make_record(3, 2.5, **{"branch/retry": 1, "branch/compaction": 4}),
    {**make_record(4, 1.5), "eval/reward_mean": 1.75, "eval/count": 32},
    make_record(5, 3.0),
]


def test_window_means_are_means_of_steps_and_the_last_may_be_shorter() -> None:
    assert window_means(RUN, 2) == [
        WindowMean(first_step=1, last_step=2, mean=1.5, rollouts=8),
        WindowMean(first_step=3, last_step=4, mean=2.0, rollouts=8),
        WindowMean(first_step=5, last_step=5, mean=3.0, rollouts=4),
    ]


def test_a_step_without_a_reward_is_left_out_of_its_window() -> None:
    idle = {name: value for name, value in make_record(2, 9.0).items() if name != "reward/mean"}
    (window,) = window_means([make_record(1, 1.0), idle, make_record(3, 2.0)], 3)
    assert (window.first_step, window.last_step, window.mean, window.rollouts) == (1, 3, 1.5, 8)


@settings(deadline=None)
@given(st.lists(st.floats(0, 3), min_size=1, max_size=30), st.integers(1, 7))
def test_windows_hold_every_step_once(rewards: list[float], window: int) -> None:
    windows = window_means([make_record(i + 1, reward) for i, reward in enumerate(rewards)], window)
    sizes = [part.last_step - part.first_step + 1 for part in windows]
    assert sum(sizes) == len(rewards)
    assert set(sizes[:-1]) <= {window}
    assert sum(p.mean * n for p, n in zip(windows, sizes, strict=True)) == pytest.approx(sum(rewards))


def test_a_rise_by_repaired_hand_ins_alone_is_told_from_one_by_better_answers() -> None:
    # Of four rollouts two, then four hand in; those that do score 2 before and after: 1.0 -> 2.0.
    repaired = [make_record(1, 1.0, completed=2), make_record(2, 2.0, completed=4)]
    assert rise_shares(repaired, 1) == RiseShares(repaired_hand_ins=1.0, better_answers=0.0)
    # All four hand in before and after: 1.0 -> 2.0 is all answers.
    answered = [make_record(1, 1.0), make_record(2, 2.0)]
    assert rise_shares(answered, 1) == RiseShares(repaired_hand_ins=0.0, better_answers=1.0)


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, float]]:
    records: list[dict[str, float]] = []
    for step in range(1, draw(st.integers(2, 8)) + 1):
        count = draw(st.integers(1, 32))
        completed = draw(st.integers(1, count))
        reward = draw(st.floats(0, 3)) * completed / count  # what did not hand in scores 0
        records.append(make_record(step, reward, count=count, completed=completed))
    return records


@settings(deadline=None)
@given(steps(), st.integers(1, 4))
def test_the_two_shares_add_up_to_the_rise(records: list[dict[str, float]], window: int) -> None:
    shares = rise_shares(records, window)
    if len(records) < 2 * window:
        assert shares is None
        return

    def mean(part: list[dict[str, float]]) -> float:
        return sum(r["reward/mean"] * r["reward/count"] for r in part) / sum(r["reward/count"] for r in part)

    assert shares is not None
    rise = mean(records[-window:]) - mean(records[:window])
    assert math.isclose(shares.repaired_hand_ins + shares.better_answers, rise, abs_tol=1e-12)


def test_a_run_in_which_nothing_was_handed_in_has_shares_of_zero() -> None:
    records = [make_record(step, 0.0, completed=0) for step in (1, 2)]
    assert rise_shares(records, 1) == RiseShares(repaired_hand_ins=0.0, better_answers=0.0)


def test_totals_leave_out_what_never_happened() -> None:
    assert totals(RUN, "branch/") == {"compaction": 4, "retry": 3}


def test_a_report_of_an_empty_run_says_so() -> None:
    assert format_report([], window=5) == "no finished step yet"
    assert format_report([make_evaluation(0, 0.5)], window=5) == "no finished step yet"
    assert training_steps([make_evaluation(0, 0.5)]) == []


def test_a_report_tells_rewards_evaluations_the_ledger_and_the_gap() -> None:
    assert format_report(RUN, window=2).splitlines() == [
        "      steps  mean reward  rollouts",
        "        1-2        1.500         8",
        "        3-4        2.000         8",
        "        5-5        3.000         4",
        "",
        "held-out tasks, greedy:",
        "  after step    0: 0.500 +- 0.125 (32 tasks)",
        "  after step    4: 1.750 (32 tasks)",
        # From p0 = 6/8, r0 = 12/6 to p1 = 1, r1 = 18/8:
        # (1 - 3/4)(2 + 9/4)/2 = 0.531 and (9/4 - 2)(3/4 + 1)/2 = 0.219, together 2.25 - 1.5.
        "rise from the first 2 steps to the last 2: +0.219 better answers, +0.531 repaired hand-ins",
        "tokens: sampled 200 = trained 120 + masked 60 + dropped 20 (orphan 60, no_spread 20)",
        "branches: compaction 4, retry 3; sampled tokens encoded again: 0, by construction",
        "outcomes: completed 18, stuck 2",
        "rollouts without a reward: 0 of 20 (none)",
        "sampler/trainer log-prob gap: at most 5e-06 nats; clipped 25.0% of tokens; 3.0 s a step (median)",
    ]


def test_a_report_of_a_run_without_updates_has_no_line_about_the_policy() -> None:
    idle = [
        {name: value for name, value in record.items() if not name.startswith("policy/")}
        for record in (make_record(1, 1.0), make_record(2, 1.0))
    ]
    report = format_report(idle, window=5)
    assert "log-prob gap" not in report
    assert "rise" not in report
    assert "held-out" not in report
