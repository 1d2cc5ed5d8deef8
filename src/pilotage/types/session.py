"""A rollout's stay at the proxy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotage.types.sampling import SamplingParams
from pilotage.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAddress:
    """Where the proxy listens, and where agents find it."""

    host: str = "127.0.0.1"
    """Name or address of this machine."""
    port: int = 0
    """0 is any that is free."""
    url: str | None = None
    """Base that agents are given, ending in /v1; None is that of host and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccess:
    """How an agent reaches its session."""

    base_url: str
    """OpenAI-compatible base, ending in /v1."""
    api_key: str
    """Bearer key; random, and valid for this session only."""
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What the runner asks for when it opens a session."""

    rollout_id: str
    sampling: SamplingParams
    ttl_s: float
    """The key expires this many seconds after it was made."""
    max_turns: int | None = None
    """Sampler calls before the proxy answers that the budget is spent; None leaves it to the agent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRecord:
    """What the proxy recorded, handed over when the session closes."""

    trajectory: Trajectory
    is_context_exceeded: bool = False
    """Whether a request was refused because it did not fit the window."""
    sampler_failure: str = ""
    """Message of the last sampler fault that was answered to the agent; empty where none."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """requests, malformed_calls, coalesced, replayed, orphaned, overridden_NAME, refused_NAME,
    hack_NAME (turns with that sign, see `algorithms.hack_gauges`)."""
