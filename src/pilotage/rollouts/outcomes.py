"""Decide, from what a trial and its session left, the one outcome of a rollout. Pure.

The order matters: a fault of the machinery comes before anything that the policy did, and a reward that is
missing before any outcome that would have one.
"""

from dataclasses import dataclass

from pilotage.localization import Submission, submission_fault
from pilotage.rollouts.report import AgentFacts, StopReason, TrialFault, TrialPhase, TrialReport
from pilotage.types import FinishReason, Outcome, RolloutFailure, SessionRecord

_ENVIRONMENT_KINDS = frozenset(
    {"SandboxError", "EnvironmentLostError", "EnvironmentStartTimeoutError", "RouteError"}
)
"""Exceptions that mean the environment failed, whatever the trial was doing."""
_REWARD_KINDS = frozenset({"RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError"})
_BUDGET_REFUSAL = "refused_turn_budget_exhausted"
"""What the proxy counts when it refuses a call beyond the session's turns."""

ADVICE = {
    Outcome.AGENT_ERROR: "run the task alone with `pilotage rollout` and read the traceback",
    Outcome.AGENT_TIMEOUT: "raise the agent's deadline, or lower max_turns or max_tokens",
    Outcome.ENVIRONMENT_ERROR: "check that the sandbox starts and that memory and disk are left",
    Outcome.VERIFIER_ERROR: "run tests/test.sh by hand; raise the verifier's deadline if it is slow",
    Outcome.REWARD_MISSING: "make tests/test.sh write the recipe's reward key to /logs/verifier/reward.json",
    Outcome.SAMPLER_ERROR: "read the sampler's log; the rollout is tried again once",
    Outcome.CANCELLED: "nothing to do: it was stopped on purpose",
}
"""What a person does about a rollout without a reward; every such outcome has an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An outcome, and what to tell a person where it is a failure."""

    outcome: Outcome
    failure: RolloutFailure | None = None


def decide(
    report: TrialReport, record: SessionRecord, *, expects_hand_in: bool, calls_model: bool
) -> Verdict:
    """Return the outcome of a rollout.

    Args:
        expects_hand_in: whether exactly one hand-in is part of the task.
        calls_model: whether the agent was given a model; one that then called none has failed to reach it.
    """
    if report.is_cancelled:
        return _failed(Outcome.CANCELLED, "trial", "the rollout was cancelled")
    if report.fault is not None and not _is_about_reward(report.fault):
        return _of_fault(report.fault, record)
    if report.agent is not None and report.agent.stop_reason == StopReason.ERROR:
        cut = _cut_by_proxy(record)
        if cut is None:
            outcome = Outcome.SAMPLER_ERROR if record.sampler_failure else Outcome.AGENT_ERROR
            return _failed(outcome, _where(outcome), record.sampler_failure or report.agent.error)
    if calls_model and not record.trajectory.turns:
        message = record.sampler_failure or "the agent made no model call; it never reached the proxy"
        outcome = Outcome.SAMPLER_ERROR if record.sampler_failure else Outcome.AGENT_ERROR
        return _failed(outcome, _where(outcome), message)
    if report.reward is None:
        return _failed(Outcome.REWARD_MISSING, "reward", _reward_problem(report))
    return Verdict(outcome=_scored(report.agent, record, expects_hand_in))


def _is_about_reward(fault: TrialFault) -> bool:
    return fault.phase == TrialPhase.VERIFIER and fault.kind in _REWARD_KINDS


def _of_fault(fault: TrialFault, record: SessionRecord) -> Verdict:
    outcome = _fault_outcome(fault, record)
    message = f"{fault.kind}: {fault.message}"
    if outcome == Outcome.SAMPLER_ERROR:
        message = record.sampler_failure
    return _failed(outcome, _where(outcome), message, fault.traceback)


def _fault_outcome(fault: TrialFault, record: SessionRecord) -> Outcome:
    if fault.phase == TrialPhase.ENVIRONMENT or fault.kind in _ENVIRONMENT_KINDS:
        return Outcome.ENVIRONMENT_ERROR
    if fault.phase == TrialPhase.VERIFIER:
        return Outcome.VERIFIER_ERROR
    if fault.kind == "AgentTimeoutError":
        return Outcome.AGENT_TIMEOUT
    if record.sampler_failure:
        return Outcome.SAMPLER_ERROR
    return _cut_by_proxy(record) or Outcome.AGENT_ERROR


def _cut_by_proxy(record: SessionRecord) -> Outcome | None:
    """Return why the proxy refused to go on, where it did."""
    if record.counters.get(_BUDGET_REFUSAL, 0):
        return Outcome.TURNS_EXHAUSTED
    return Outcome.CONTEXT_EXCEEDED if record.is_context_exceeded else None


def _scored(agent: AgentFacts | None, record: SessionRecord, expects_hand_in: bool) -> Outcome:
    if agent is None or agent.stop_reason == StopReason.ERROR:
        own = _cut_by_proxy(record)
    else:
        own = {
            StopReason.MAX_TURNS: Outcome.TURNS_EXHAUSTED,
            StopReason.STUCK: Outcome.STUCK,
            StopReason.CONTEXT_EXCEEDED: Outcome.CONTEXT_EXCEEDED,
        }.get(agent.stop_reason)
    if own is not None:
        return own
    hand_ins = len(agent.hand_ins) if agent is not None else 0
    turns = record.trajectory.turns
    if turns and turns[-1].finish_reason == FinishReason.LENGTH and hand_ins == 0:
        return Outcome.TOKENS_EXHAUSTED
    if expects_hand_in and agent is not None and invalid_submission(agent, record):
        return Outcome.SUBMISSION_INVALID
    return Outcome.COMPLETED


def invalid_submission(agent: AgentFacts, record: SessionRecord) -> str:
    """Return which rule of the submission gate the rollout breaks; empty where it breaks none."""
    turns = record.trajectory.turns
    return submission_fault(
        Submission(
            hand_ins=len(agent.hand_ins),
            last_turn_calls=agent.last_turn_calls,
            is_cut_off=bool(turns) and turns[-1].finish_reason == FinishReason.LENGTH,
        )
    )


def _reward_problem(report: TrialReport) -> str:
    if report.reward_problem:
        return report.reward_problem
    return report.fault.message if report.fault is not None else "the verifier did not run"


def _where(outcome: Outcome) -> str:
    return {
        Outcome.ENVIRONMENT_ERROR: "environment",
        Outcome.VERIFIER_ERROR: "verifier",
        Outcome.SAMPLER_ERROR: "sampler",
    }.get(outcome, "agent")


def _failed(outcome: Outcome, where: str, message: str, traceback: str = "") -> Verdict:
    failure = RolloutFailure(
        where=where, message=message, advice=ADVICE.get(outcome, ""), traceback=traceback
    )
    return Verdict(outcome=outcome, failure=failure)
