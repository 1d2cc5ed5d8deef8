"""Frozen records that the layers exchange; no behaviour beyond their own invariants."""

from pilotage.types.arrays import Logprobs, Mask, TokenIds, Versions, token_ids
from pilotage.types.ledger import Ledger
from pilotage.types.messages import Message, ParsedReply, Role, ToolCall, ToolSchema
from pilotage.types.outcome import (
    CUT_SHORT_OUTCOMES,
    OUTCOME_RULES,
    Outcome,
    OutcomeRule,
    Reward,
)
from pilotage.types.rollout import Rollout, RolloutFailure, RolloutRequest
from pilotage.types.sample import Sample
from pilotage.types.sampling import Completion, FinishReason, SamplingParams
from pilotage.types.session import ProxyAddress, SessionAccess, SessionRecord, SessionSpec
from pilotage.types.task import Task
from pilotage.types.training import (
    AdamParams,
    Denominators,
    ForwardBackwardFigures,
    ForwardBackwardResult,
    LossConfig,
    PolicyLoss,
    Reduction,
    StepResult,
)
from pilotage.types.trajectory import BranchCause, Trajectory, Turn

__all__ = [
    "CUT_SHORT_OUTCOMES",
    "OUTCOME_RULES",
    "AdamParams",
    "BranchCause",
    "Completion",
    "Denominators",
    "FinishReason",
    "ForwardBackwardFigures",
    "ForwardBackwardResult",
    "Ledger",
    "Logprobs",
    "LossConfig",
    "Mask",
    "Message",
    "Outcome",
    "OutcomeRule",
    "ParsedReply",
    "PolicyLoss",
    "ProxyAddress",
    "Reduction",
    "Reward",
    "Role",
    "Rollout",
    "RolloutFailure",
    "RolloutRequest",
    "Sample",
    "SamplingParams",
    "SessionAccess",
    "SessionRecord",
    "SessionSpec",
    "StepResult",
    "Task",
    "TokenIds",
    "ToolCall",
    "ToolSchema",
    "Trajectory",
    "Turn",
    "Versions",
    "token_ids",
]
