"""What a trial leaves to be read: how the agent ended, and how the trial did. Picklable; no Harbor in it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pilotage.errors import PilotageError
from pilotage.types import Reward


class EnvironmentLostError(PilotageError):
    """An agent's tool could not use the environment; nothing that the policy did."""


class StopReason(StrEnum):
    """Why an agent's own loop ended."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    STUCK = "stuck"
    CONTEXT_EXCEEDED = "context_exceeded"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """How an agent that reports itself ended; an agent that does not has none."""

    stop_reason: StopReason
    turns: int
    """Replies of the model that the agent read."""
    hand_ins: tuple[str, ...] = ()
    """Accepted hand-ins as JSON, in order; a task that wants one wants exactly one."""
    rejected_hand_ins: int = 0
    last_turn_calls: int = 0
    """Tool calls of the last reply."""
    last_message: str = ""
    error: str = ""

    def to_metadata(self) -> dict[str, Any]:
        """Return a JSON object, for the metadata of Harbor's agent context."""
        return {
            "stop_reason": self.stop_reason.value,
            "turns": self.turns,
            "hand_ins": list(self.hand_ins),
            "rejected_hand_ins": self.rejected_hand_ins,
            "last_turn_calls": self.last_turn_calls,
            "last_message": self.last_message,
            "error": self.error,
        }

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any] | None) -> Self | None:
        """Read what `to_metadata` wrote; None where another agent wrote something else, or nothing."""
        if metadata is None or metadata.get("stop_reason") not in list(StopReason):
            return None
        return cls(
            stop_reason=StopReason(metadata["stop_reason"]),
            turns=metadata["turns"],
            hand_ins=tuple(metadata["hand_ins"]),
            rejected_hand_ins=metadata["rejected_hand_ins"],
            last_turn_calls=metadata["last_turn_calls"],
            last_message=metadata["last_message"],
            error=metadata["error"],
        )


class TrialPhase(StrEnum):
    """Part of a trial; where a fault is looked for."""

    ENVIRONMENT = "environment"
    AGENT = "agent"
    VERIFIER = "verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFault:
    """An exception that ended a trial, or a part of it."""

    phase: TrialPhase
    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Everything that outlives a trial."""

    fault: TrialFault | None = None
    reward: Reward | None = None
    reward_problem: str = ""
    """Why there is no reward although the verifier ran."""
    agent: AgentFacts | None = None
    is_cancelled: bool = False
    timings_s: dict[str, float] = field(default_factory=dict[str, float])
