"""What is going wrong with a run, by rules over its records. Pure.

    records (and what the machine says) --rules--> alarms, each with its likely causes and the check to run

A rule looks at the end of the records: an alarm is about now. Where the figures that a rule needs were not
measured, it is silent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, median
from types import MappingProxyType

from pilotage.ops.report import Record, training_steps
from pilotage.types import OUTCOME_RULES

_WINDOW = 3
"""Steps in a row that a rule wants to see."""
_LONG_WINDOW = 10
_FAST = 0.25
"""A step is too fast below this share of the run's own median."""
_ERROR_SHARE = 0.1
_GAP_NATS = 0.05
"""Mean gap above which sampler and trainer do not hold the same policy, whatever it was before."""
_GAP_GROWTH = 5.0
_GAP_FLOOR_NATS = 1e-3
"""Growth below this is rounding."""
_CLIPPED = 0.5
_LAG_VERSIONS = 4.0
_MALFORMED_SHARE = 0.2
_MALFORMED_GROWTH = 2.0
_HACK_SHARE = 0.05
_STALL_STEPS = 5.0
_STALL_FLOOR_S = 120.0
_DISK_SHARE = 0.05
_PTY_SHARE = 0.9


class AlarmName(StrEnum):
    """What can go wrong."""

    STEPS_TOO_FAST = "steps_too_fast"
    REWARDS_ZERO = "rewards_zero"
    REWARDS_EQUAL = "rewards_equal"
    ERROR_RATE = "error_rate"
    GAP_GROWS = "gap_grows"
    CLIP_NEVER = "clip_never"
    CLIP_ALWAYS = "clip_always"
    LAG = "lag"
    PARSE_FAILURES = "parse_failures"
    HACK_GAUGE = "hack_gauge"
    STALLED = "stalled"
    DISK_LOW = "disk_low"
    PTYS_LOW = "ptys_low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What a person does about an alarm."""

    meaning: str
    causes: tuple[str, ...]
    check: str
    """A command to run, RUN standing for the run's directory."""


GUIDES: Mapping[AlarmName, Guide] = MappingProxyType(
    {
        AlarmName.STEPS_TOO_FAST: Guide(
            meaning=f"steps take less than {_FAST:.0%} of the run's median, or rollouts end without a turn",
            causes=(
                "the agent fails before its first model call",
                "every rollout ends in its first turn, because the policy hands in at once",
                "the sandbox or the task's image is gone",
            ),
            check="pilotage view RUN",
        ),
        AlarmName.REWARDS_ZERO: Guide(
            meaning=f"the mean reward is 0 for {_WINDOW} steps",
            causes=(
                "the policy has collapsed: the learning rate is too high for its size",
                "tests/test.sh fails in every sandbox, so that nothing can earn",
                "no task can be solved by this policy",
            ),
            check="pilotage data check TASKS",
        ),
        AlarmName.REWARDS_EQUAL: Guide(
            meaning=f"no group has a spread of rewards for {_WINDOW} steps: nothing to learn from",
            causes=(
                "the tasks are too hard or too easy for the policy",
                "the temperature is so low that all rollouts of a group are the same",
                "the verifier gives everybody the same",
            ),
            check="pilotage report RUN",
        ),
        AlarmName.ERROR_RATE: Guide(
            meaning=f"more than {_ERROR_SHARE:.0%} of the last {_WINDOW} steps' rollouts have no reward",
            causes=(
                "the machine is out of memory, processes or disk",
                "a deadline is too short for the load",
                "the sampler refuses or loses calls",
            ),
            check="pilotage report RUN",
        ),
        AlarmName.GAP_GROWS: Guide(
            meaning="the log-probs of sampler and trainer drift apart",
            causes=(
                "a publish did not reach the sampler, or not whole",
                "the sampler returns raw log-probs, before the temperature",
                "the two use other kernels or precisions, and the policy has grown sharp",
            ),
            check="pilotage doctor RECIPE",
        ),
        AlarmName.CLIP_NEVER: Guide(
            meaning=f"the clip has bound no token in {_LONG_WINDOW} steps although tokens lag behind",
            causes=(
                "the ratio is computed against the trainer's own log-probs",
                "the clip's bounds are far too wide for the lag",
            ),
            check="pilotage report RUN",
        ),
        AlarmName.CLIP_ALWAYS: Guide(
            meaning=f"the clip binds more than {_CLIPPED:.0%} of the tokens for {_WINDOW} steps",
            causes=(
                "sampler and trainer do not hold the same weights",
                "the learning rate is too high for the clip's bounds",
                "the sampler's temperature is not the loss's",
            ),
            check="pilotage report RUN",
        ),
        AlarmName.LAG: Guide(
            meaning=f"trained tokens are more than {_LAG_VERSIONS:g} weights versions old",
            causes=("rollouts are slower than training", "a few long rollouts hold up their groups"),
            check="pilotage report RUN",
        ),
        AlarmName.PARSE_FAILURES: Guide(
            meaning=f"malformed tool calls are more than {_MALFORMED_SHARE:.0%} of turns, and rising",
            causes=(
                "the policy drifts from its template's call syntax",
                "the renderer does not fit the model's template",
            ),
            check="pilotage verify-template MODEL",
        ),
        AlarmName.HACK_GAUGE: Guide(
            meaning=f"more than {_HACK_SHARE:.0%} of the last {_WINDOW} steps' rollouts show signs of a hack",
            causes=(
                "the task leaks its answer: history, tests, an installed copy",
                "the policy has learned to write the reward instead of earning it",
            ),
            check="pilotage data check TASKS",
        ),
        AlarmName.STALLED: Guide(
            meaning=f"no step for {_STALL_STEPS:g} times the median",
            causes=(
                "one rollout hangs until its deadline",
                "the service or its job is gone",
                "the machine is swapping",
            ),
            check="pilotage status RUN",
        ),
        AlarmName.DISK_LOW: Guide(
            meaning=f"less than {_DISK_SHARE:.0%} of the disk that holds the run is free",
            causes=("checkpoints of a long run", "trial directories that killed runs left"),
            check="pilotage sweep",
        ),
        AlarmName.PTYS_LOW: Guide(
            meaning=f"more than {_PTY_SHARE:.0%} of the machine's pseudo-terminals are in use",
            causes=("terminals that killed agents left", "other programs of this machine"),
            check="pilotage sweep",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong now."""

    name: AlarmName
    step: int
    """Last step that was looked at."""
    evidence: str

    @property
    def guide(self) -> Guide:
        """What to do about it."""
        return GUIDES[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run's records do not say."""

    seconds_since_record: float
    free_disk_share: float
    """Of the file system that holds the run; 0 to 1."""
    used_pty_share: float


type _Rule = Callable[[Sequence[Record]], str | None]


def _rollouts(step: Record) -> float:
    return step["reward/count"] + step.get("reward/none_count", 0)


def _steps_too_fast(steps: Sequence[Record]) -> str | None:
    last = steps[-_WINDOW:]
    if len(last) < _WINDOW:
        return None
    turns = [step["rollout/turns_mean"] for step in last if "rollout/turns_mean" in step]
    if turns and max(turns) < 1:
        return f"{mean(turns):.2f} turns a rollout"
    seconds = [step["time/step_s"] for step in steps if "time/step_s" in step]
    if not seconds:
        return None
    usual, seconds = median(seconds), seconds[-_WINDOW:]
    if max(seconds) < _FAST * usual:
        return f"the last {_WINDOW} steps took {mean(seconds):.1f} s, the run's median is {usual:.1f} s"
    return None


def _rewards_zero(steps: Sequence[Record]) -> str | None:
    last = steps[-_WINDOW:]
    if len(last) == _WINDOW and all(step["reward/mean"] == 0 for step in last):
        best = max(step["reward/mean"] for step in steps)
        return f"mean reward 0 in {_WINDOW} steps; the best step had {best:.2f}"
    return None


def _rewards_equal(steps: Sequence[Record]) -> str | None:
    last = [step for step in steps if {"group/trained", "group/no_spread"} <= step.keys()][-_WINDOW:]
    if len(last) == _WINDOW and all(step["group/trained"] == 0 < step["group/no_spread"] for step in last):
        return f"{sum(step['group/no_spread'] for step in last):.0f} groups without spread, none with"
    return None


_FAILURES = tuple(f"outcome/{outcome}" for outcome, rule in OUTCOME_RULES.items() if not rule.has_reward)


def _error_rate(steps: Sequence[Record]) -> str | None:
    last = steps[-_WINDOW:]
    failed = {name: sum(step.get(name, 0) for step in last) for name in _FAILURES}
    rollouts = sum(map(_rollouts, last))
    if not rollouts or sum(failed.values()) <= _ERROR_SHARE * rollouts:
        return None
    listed = ", ".join(f"{name.removeprefix('outcome/')} {n:.0f}" for name, n in failed.items() if n)
    return f"{sum(failed.values()):.0f} of {rollouts:.0f} rollouts: {listed}"


def _gap_grows(steps: Sequence[Record]) -> str | None:
    gaps = [step["policy/logprob_gap_mean"] for step in steps if "policy/logprob_gap_mean" in step]
    if len(gaps) < _WINDOW:
        return None
    now, before = mean(gaps[-_WINDOW:]), mean(gaps[:_LONG_WINDOW])
    has_grown = len(gaps) > _LONG_WINDOW and now > max(_GAP_GROWTH * before, _GAP_FLOOR_NATS)
    return f"mean gap {now:.2g} nats, at first {before:.2g}" if now > _GAP_NATS or has_grown else None


def _clip_never(steps: Sequence[Record]) -> str | None:
    last = [step for step in steps if "policy/clip_fraction" in step][-_LONG_WINDOW:]
    lag = [step.get("lag/mean_versions", 0.0) for step in last]
    if len(last) == _LONG_WINDOW and min(lag) > 0 and all(step["policy/clip_fraction"] == 0 for step in last):
        return f"no token clipped in {_LONG_WINDOW} steps, {mean(lag):.1f} versions of lag"
    return None


def _clip_always(steps: Sequence[Record]) -> str | None:
    last = [step["policy/clip_fraction"] for step in steps if "policy/clip_fraction" in step][-_WINDOW:]
    if len(last) == _WINDOW and min(last) > _CLIPPED:
        return f"{mean(last):.0%} of tokens clipped"
    return None


def _lag(steps: Sequence[Record]) -> str | None:
    last = [step["lag/mean_versions"] for step in steps if "lag/mean_versions" in step][-_WINDOW:]
    return f"{mean(last):.1f} versions" if last and mean(last) > _LAG_VERSIONS else None


def _malformed_share(steps: Sequence[Record]) -> float:
    turns = sum(step["rollout/turns_mean"] * _rollouts(step) for step in steps)
    return sum(step["proxy/malformed_calls"] for step in steps) / turns if turns else 0.0


def _parse_failures(steps: Sequence[Record]) -> str | None:
    measured = [step for step in steps if {"proxy/malformed_calls", "rollout/turns_mean"} <= step.keys()]
    last, before = measured[-_WINDOW:], measured[:-_WINDOW][-_LONG_WINDOW:]
    if len(last) < _WINDOW:
        return None
    now, earlier = _malformed_share(last), _malformed_share(before)
    if now > _MALFORMED_SHARE and now > _MALFORMED_GROWTH * earlier:
        return f"{now:.0%} of turns malformed, {earlier:.0%} before"
    return None


def _hack_gauge(steps: Sequence[Record]) -> str | None:
    last = steps[-_WINDOW:]
    rollouts = sum(map(_rollouts, last))
    shown: dict[str, float] = {}
    for step in last:
        for name, count in step.items():
            if name.startswith("hack/"):
                shown[name.removeprefix("hack/")] = shown.get(name.removeprefix("hack/"), 0) + count
    listed = ", ".join(f"{name} {n:.0f}" for name, n in shown.items() if n > _HACK_SHARE * rollouts)
    return f"of {rollouts:.0f} rollouts: {listed}" if listed else None


_RULES: Mapping[AlarmName, _Rule] = {
    AlarmName.STEPS_TOO_FAST: _steps_too_fast,
    AlarmName.REWARDS_ZERO: _rewards_zero,
    AlarmName.REWARDS_EQUAL: _rewards_equal,
    AlarmName.ERROR_RATE: _error_rate,
    AlarmName.GAP_GROWS: _gap_grows,
    AlarmName.CLIP_NEVER: _clip_never,
    AlarmName.CLIP_ALWAYS: _clip_always,
    AlarmName.LAG: _lag,
    AlarmName.PARSE_FAILURES: _parse_failures,
    AlarmName.HACK_GAUGE: _hack_gauge,
}


def find_alarms(records: Sequence[Record], surroundings: Surroundings | None = None) -> list[Alarm]:
    """Return what is wrong at the end of `records`.

    Args:
        surroundings: of a run that is going on; None leaves out the rules that need them.
    """
    # A step in which every rollout failed has no mean reward, and is a step all the same.
    steps = [record for record in records if record["step"] > 0 and "reward/count" in record]
    rewarded = training_steps(records)
    step = int(records[-1]["step"]) if records else 0
    found = {name: rule(steps if name not in _OF_REWARDS else rewarded) for name, rule in _RULES.items()}
    if surroundings is not None:
        found |= _of_surroundings(steps, surroundings)
    return [Alarm(name=name, step=step, evidence=evidence) for name, evidence in found.items() if evidence]


_OF_REWARDS = frozenset({AlarmName.REWARDS_ZERO, AlarmName.REWARDS_EQUAL})


def format_alarms(alarms: Sequence[Alarm]) -> list[str]:
    """Return a few lines for each alarm: what was seen, what may be behind it, what to run."""
    lines: list[str] = []
    for alarm in alarms:
        lines.append(f"ALARM {alarm.name} at step {alarm.step}: {alarm.evidence}")
        lines += [f"  may be: {cause}" for cause in alarm.guide.causes]
        lines.append(f"  check: {alarm.guide.check}")
    return lines


def _of_surroundings(steps: Sequence[Record], around: Surroundings) -> dict[AlarmName, str | None]:
    found: dict[AlarmName, str | None] = {}
    seconds = [step["time/step_s"] for step in steps if "time/step_s" in step]
    usual = median(seconds) if seconds else None
    if usual is not None and around.seconds_since_record > max(_STALL_STEPS * usual, _STALL_FLOOR_S):
        found[AlarmName.STALLED] = (
            f"{around.seconds_since_record:.0f} s since the last step, the median is {usual:.1f} s"
        )
    if around.free_disk_share < _DISK_SHARE:
        found[AlarmName.DISK_LOW] = f"{around.free_disk_share:.1%} of the disk is free"
    if around.used_pty_share > _PTY_SHARE:
        found[AlarmName.PTYS_LOW] = f"{around.used_pty_share:.0%} of the pseudo-terminals are in use"
    return found
