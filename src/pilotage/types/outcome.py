"""How a rollout can end, and the one table that says what each end means for training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Outcome(StrEnum):
    """The declared end of a rollout; every rollout has exactly one."""

    COMPLETED = "completed"
    SUBMISSION_INVALID = "submission_invalid"
    """Nothing handed in, handed in twice, or malformed."""
    TURNS_EXHAUSTED = "turns_exhausted"
    CONTEXT_EXCEEDED = "context_exceeded"
    TOKENS_EXHAUSTED = "tokens_exhausted"
    """The last turn was cut by its token limit."""
    STUCK = "stuck"
    """The agent's own loop detection stopped it."""
    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    ENVIRONMENT_ERROR = "environment_error"
    VERIFIER_ERROR = "verifier_error"
    REWARD_MISSING = "reward_missing"
    SAMPLER_ERROR = "sampler_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRule:
    """What one outcome means."""

    has_reward: bool
    """Whether the verifier's reward stands; otherwise the reward is None."""
    is_trained: bool
    """Whether its tokens enter the loss; otherwise they are masked, with the outcome as the reason."""
    in_baseline: bool
    """Whether its reward counts in the group's mean."""
    max_retries: int = 0


_SCORED = OutcomeRule(has_reward=True, is_trained=True, in_baseline=True)
_LOST = OutcomeRule(has_reward=False, is_trained=False, in_baseline=False)
_FAULT = OutcomeRule(has_reward=False, is_trained=False, in_baseline=False, max_retries=1)

OUTCOME_RULES: Mapping[Outcome, OutcomeRule] = MappingProxyType(
    {
        Outcome.COMPLETED: _SCORED,
        Outcome.SUBMISSION_INVALID: _SCORED,
        Outcome.TURNS_EXHAUSTED: _SCORED,
        Outcome.CONTEXT_EXCEEDED: _SCORED,
        Outcome.TOKENS_EXHAUSTED: _SCORED,
        Outcome.STUCK: _SCORED,
        Outcome.AGENT_ERROR: _FAULT,
        Outcome.AGENT_TIMEOUT: _LOST,
        Outcome.ENVIRONMENT_ERROR: _FAULT,
        Outcome.VERIFIER_ERROR: _FAULT,
        Outcome.REWARD_MISSING: _FAULT,
        Outcome.SAMPLER_ERROR: _FAULT,
        Outcome.CANCELLED: _LOST,
    }
)
"""The default table; a recipe may only choose for the outcomes that cut a rollout short."""

CUT_SHORT_OUTCOMES = frozenset({Outcome.TURNS_EXHAUSTED, Outcome.CONTEXT_EXCEEDED, Outcome.TOKENS_EXHAUSTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One number with its provenance."""

    value: float
    key: str
    """Which key of the verifier's output it was."""
    source: str
    """File that it was read from, relative to the trial directory."""
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """Everything else that the verifier reported, by key."""
