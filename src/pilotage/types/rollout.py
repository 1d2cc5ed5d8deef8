"""One attempt at one task: the request, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotage.types.outcome import Outcome, Reward
from pilotage.types.sampling import SamplingParams
from pilotage.types.task import Task
from pilotage.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What the loop asks a runner to do."""

    id: str
    """Unique over the run, for example `train-0003-task-2-1`; names the trial directory."""
    group_id: str
    """Rollouts that share it share a baseline."""
    task: Task
    sampling: SamplingParams
    """With the rollout's own seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """What a person needs to act on a failed rollout; becomes its `.error` file."""

    where: str
    """Phase that failed: environment, agent, verifier, reward, sampler."""
    message: str
    advice: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished attempt. `reward` is None where there is none, never 0."""

    id: str
    group_id: str
    task_id: str
    attempt: int
    """0 for the first try, 1 after an infrastructure fault was retried."""
    outcome: Outcome
    reward: Reward | None
    trajectory: Trajectory
    discarded_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens that earlier attempts sampled, by the outcome that had them retried."""
    failure: RolloutFailure | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase: environment, agent, verifier, total."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """What the proxy counted: malformed calls, overridden settings, coalesced and replayed requests."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the agent left to read: status, hand-in, last message."""
