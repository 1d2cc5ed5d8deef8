"""From what a trial and its session left to exactly one outcome."""

from typing import Any

import numpy as np
import pytest

from pilotage.rollouts.outcomes import decide
from pilotage.rollouts.report import AgentFacts, StopReason, TrialFault, TrialPhase, TrialReport
from pilotage.types import (
    FinishReason,
    Outcome,
    Reward,
    SamplingParams,
    SessionRecord,
    Trajectory,
    Turn,
    token_ids,
)

REWARD = Reward(value=1.0, key="reward", source="verifier/reward.txt")
HAND_IN = '{"locations": [{"file": "a.py"}]}'


def turn(finish_reason: FinishReason = FinishReason.STOP) -> Turn:
    return Turn(
        parent=None,
        context_ids=token_ids([1]),
        completion_ids=token_ids([2]),
        logprobs=np.zeros(1, np.float32),
        weights_versions=np.zeros(1, np.int32),
        finish_reason=finish_reason,
        sampling=SamplingParams(),
        started_at=0.0,
        finished_at=1.0,
    )


def record(*turns: Turn, **fields: Any) -> SessionRecord:
    return SessionRecord(trajectory=Trajectory(turns=turns), **fields)


def agent(stop_reason: StopReason = StopReason.FINISHED, *hand_ins: str, error: str = "") -> AgentFacts:
    return AgentFacts(stop_reason=stop_reason, turns=1, hand_ins=hand_ins, last_turn_calls=1, error=error)


def fault(phase: TrialPhase, kind: str = "ValueError") -> TrialFault:
    return TrialFault(phase=phase, kind=kind, message="boom", traceback="trace")


AGENT, ENVIRONMENT, VERIFIER = TrialPhase.AGENT, TrialPhase.ENVIRONMENT, TrialPhase.VERIFIER
ONE = record(turn())
SPENT = record(turn(), counters={"refused_turn_budget_exhausted": 1})
FULL = record(turn(), is_context_exceeded=True)
CUT = record(turn(FinishReason.LENGTH))
BROKEN = record(turn(), sampler_failure="out of memory")


@pytest.mark.parametrize(
    ("report", "session", "outcome"),
    [
        (TrialReport(agent=agent(), reward=REWARD), ONE, Outcome.COMPLETED),
        (TrialReport(agent=None, reward=REWARD), ONE, Outcome.COMPLETED),
        (TrialReport(is_cancelled=True, reward=REWARD), ONE, Outcome.CANCELLED),
        # faults, wherever the trial was
        (TrialReport(fault=fault(ENVIRONMENT)), record(), Outcome.ENVIRONMENT_ERROR),
        (TrialReport(fault=fault(AGENT, "SandboxError")), ONE, Outcome.ENVIRONMENT_ERROR),
        (TrialReport(fault=fault(VERIFIER, "SandboxError")), ONE, Outcome.ENVIRONMENT_ERROR),
        (TrialReport(fault=fault(AGENT)), ONE, Outcome.AGENT_ERROR),
        (TrialReport(fault=fault(AGENT, "NonZeroAgentExitCodeError")), record(), Outcome.AGENT_ERROR),  # H9
        (TrialReport(fault=fault(AGENT, "AgentTimeoutError"), reward=REWARD), ONE, Outcome.AGENT_TIMEOUT),
        (TrialReport(fault=fault(AGENT)), BROKEN, Outcome.SAMPLER_ERROR),
        (TrialReport(fault=fault(AGENT)), FULL, Outcome.CONTEXT_EXCEEDED),
        (TrialReport(fault=fault(VERIFIER, "VerifierTimeoutError")), ONE, Outcome.VERIFIER_ERROR),
        (TrialReport(fault=fault(VERIFIER, "RewardFileNotFoundError")), ONE, Outcome.REWARD_MISSING),
        (TrialReport(fault=fault(VERIFIER, "VerifierOutputParseError")), ONE, Outcome.REWARD_MISSING),
        # an agent that reports its own error
        (TrialReport(agent=agent(StopReason.ERROR), reward=REWARD), ONE, Outcome.AGENT_ERROR),
        (TrialReport(agent=agent(StopReason.ERROR), reward=REWARD), BROKEN, Outcome.SAMPLER_ERROR),
        (TrialReport(agent=agent(StopReason.ERROR), reward=REWARD), SPENT, Outcome.TURNS_EXHAUSTED),
        (TrialReport(agent=agent(StopReason.ERROR), reward=REWARD), FULL, Outcome.CONTEXT_EXCEEDED),
        # no call at all looks complete, and is not (H9, H11)
        (TrialReport(agent=None, reward=REWARD), record(), Outcome.AGENT_ERROR),
        (TrialReport(reward=REWARD), record(sampler_failure="down"), Outcome.SAMPLER_ERROR),
        # what the policy did
        (TrialReport(agent=agent(StopReason.MAX_TURNS), reward=REWARD), ONE, Outcome.TURNS_EXHAUSTED),
        (TrialReport(agent=agent(StopReason.STUCK), reward=REWARD), ONE, Outcome.STUCK),
        (
            TrialReport(agent=agent(StopReason.CONTEXT_EXCEEDED), reward=REWARD),
            FULL,
            Outcome.CONTEXT_EXCEEDED,
        ),
        (
            TrialReport(agent=agent(), reward=REWARD),
            record(turn(FinishReason.LENGTH)),
            Outcome.TOKENS_EXHAUSTED,
        ),
        # a scored end needs a score
        (TrialReport(agent=agent(), reward_problem="reward.txt is empty"), ONE, Outcome.REWARD_MISSING),
        (TrialReport(agent=agent(StopReason.STUCK), reward_problem="none"), ONE, Outcome.REWARD_MISSING),
    ],
)
def test_every_end_has_one_outcome(report: TrialReport, session: SessionRecord, outcome: Outcome) -> None:
    assert decide(report, session, expects_hand_in=False, calls_model=True).outcome == outcome


@pytest.mark.parametrize(
    ("hand_ins", "outcome"),
    [
        ((), Outcome.SUBMISSION_INVALID),
        ((HAND_IN,), Outcome.COMPLETED),
        ((HAND_IN, HAND_IN), Outcome.SUBMISSION_INVALID),
    ],
)
def test_a_task_that_wants_a_hand_in_wants_exactly_one(hand_ins: tuple[str, ...], outcome: Outcome) -> None:
    report = TrialReport(agent=agent(StopReason.FINISHED, *hand_ins), reward=REWARD)

    assert decide(report, ONE, expects_hand_in=True, calls_model=True).outcome == outcome


def test_a_cut_last_turn_with_a_hand_in_is_an_invalid_submission() -> None:
    report = TrialReport(agent=agent(StopReason.FINISHED, HAND_IN), reward=REWARD)
    session = record(turn(FinishReason.LENGTH))

    verdict = decide(report, session, expects_hand_in=True, calls_model=True)
    assert verdict.outcome == Outcome.SUBMISSION_INVALID


def test_an_agent_without_a_model_completes_without_a_turn() -> None:
    verdict = decide(TrialReport(reward=REWARD), record(), expects_hand_in=False, calls_model=False)

    assert verdict.outcome == Outcome.COMPLETED


def test_a_failure_says_where_what_and_what_to_do() -> None:
    failure = decide(
        TrialReport(fault=fault(TrialPhase.VERIFIER)), ONE, expects_hand_in=False, calls_model=True
    ).failure

    assert failure is not None
    assert (failure.where, failure.message, failure.traceback) == ("verifier", "ValueError: boom", "trace")
    assert "tests/test.sh" in failure.advice


def test_a_scored_outcome_is_no_failure() -> None:
    report = TrialReport(agent=agent(StopReason.STUCK), reward=REWARD)

    assert decide(report, ONE, expects_hand_in=True, calls_model=True).failure is None
