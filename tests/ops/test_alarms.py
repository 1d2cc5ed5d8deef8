"""Alarms: each fires on the records of what it is about, and all are silent on good runs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.ops.alarms import GUIDES, Alarm, AlarmName, Surroundings, find_alarms
from pilotage.types import Outcome

type Records = list[dict[str, float]]

QUIET = Surroundings(seconds_since_record=5.0, free_disk_share=0.5, used_pty_share=0.1)


def good_step(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 1.0 + step / 100,
        "reward/count": 32,
        "reward/none_count": 0,
        **{f"outcome/{outcome}": 0 for outcome in Outcome},
        "outcome/completed": 32,
        "group/trained": 6,
        "group/no_spread": 2,
        "rollout/turns_mean": 2.5,
        "proxy/malformed_calls": 1,
        "hack/git_history": 0,
        "policy/logprob_gap_mean": 1e-6,
        "policy/clip_fraction": 0.0,
        "lag/mean_versions": 0.0,
        "time/step_s": 7.0 + step % 3,
    }


def run_of(count: int, *, tail: int = 0, **changes: float) -> Records:
    """A good run whose last `tail` steps have other figures; `a__b` stands for `a/b`."""
    records: Records = [{"step": 0, "weights_version": 1}, *map(good_step, range(1, count + 1))]
    for record in records[len(records) - tail :]:
        record |= {name.replace("__", "/"): value for name, value in changes.items()}
    return records


def names(records: Records, around: Surroundings | None = QUIET) -> set[AlarmName]:
    return {alarm.name for alarm in find_alarms(records, around)}


BROKEN: dict[AlarmName, Records] = {
    AlarmName.STEPS_TOO_FAST: run_of(12, tail=3, time__step_s=0.5),
    AlarmName.REWARDS_ZERO: run_of(12, tail=3, reward__mean=0.0),
    AlarmName.REWARDS_EQUAL: run_of(12, tail=3, group__trained=0, group__no_spread=8),
    AlarmName.ERROR_RATE: run_of(
        12, tail=3, outcome__sampler_error=8, reward__none_count=8, reward__count=24
    ),
    AlarmName.GAP_GROWS: run_of(12, tail=3, policy__logprob_gap_mean=0.2),
    AlarmName.CLIP_NEVER: run_of(12, tail=10, lag__mean_versions=1.5),
    AlarmName.CLIP_ALWAYS: run_of(12, tail=3, policy__clip_fraction=0.9),
    AlarmName.LAG: run_of(12, tail=3, lag__mean_versions=9.0, policy__clip_fraction=0.1),
    AlarmName.PARSE_FAILURES: run_of(12, tail=3, proxy__malformed_calls=40),
    AlarmName.HACK_GAUGE: run_of(12, tail=3, hack__git_history=9),
}
AROUND: dict[AlarmName, Surroundings] = {
    AlarmName.STALLED: Surroundings(seconds_since_record=900.0, free_disk_share=0.5, used_pty_share=0.1),
    AlarmName.DISK_LOW: Surroundings(seconds_since_record=5.0, free_disk_share=0.01, used_pty_share=0.1),
    AlarmName.PTYS_LOW: Surroundings(seconds_since_record=5.0, free_disk_share=0.5, used_pty_share=0.99),
}


def test_every_alarm_has_a_broken_run_here_and_a_guide() -> None:
    assert BROKEN.keys() | AROUND.keys() == set(AlarmName)
    assert GUIDES.keys() == set(AlarmName)
    assert all(guide.causes and guide.check.startswith("pilotage ") for guide in GUIDES.values())


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_goes_wrong_raises_its_alarm_and_no_other(name: AlarmName) -> None:
    (alarm,) = find_alarms(BROKEN[name], QUIET)
    assert alarm.name == name
    assert alarm.step == 12
    assert alarm.evidence


@pytest.mark.parametrize("name", AROUND)
def test_what_only_the_machine_knows_is_asked_of_it(name: AlarmName) -> None:
    assert names(run_of(12), AROUND[name]) == {name}
    assert names(run_of(12), None) == set()


def test_a_run_whose_agents_never_start_is_noticed_from_its_first_steps() -> None:
    failed = {"reward__count": 0, "reward__none_count": 32, "outcome__agent_error": 32}
    records = run_of(3, tail=3, rollout__turns_mean=0.0, proxy__malformed_calls=0, **failed)
    for record in records[1:]:
        del record["reward/mean"]
    assert {AlarmName.STEPS_TOO_FAST, AlarmName.ERROR_RATE} <= names(records)


def test_growth_of_the_gap_counts_once_it_is_more_than_rounding() -> None:
    assert names(run_of(14, tail=3, policy__logprob_gap_mean=5e-4)) == set()
    assert names(run_of(14, tail=3, policy__logprob_gap_mean=5e-3)) == {AlarmName.GAP_GROWS}


def test_an_alarm_passes_when_its_cause_has() -> None:
    records = run_of(12, tail=3, reward__mean=0.0)
    assert names([*records, good_step(13)]) == set()


@given(length=st.integers(0, 40))
def test_a_good_run_is_silent_at_every_length(length: int) -> None:
    assert find_alarms(run_of(length), QUIET) == []


@given(st.sets(st.sampled_from(sorted(good_step(1).keys() - {"step", "reward/count"}))))
def test_a_figure_that_was_not_measured_raises_nothing(absent: set[str]) -> None:
    records: Sequence[dict[str, float]] = [
        {name: value for name, value in record.items() if name not in absent} for record in run_of(15)
    ]
    found: list[Alarm] = find_alarms(records, QUIET)
    assert found == []
