"""What a recipe needs, in the words of the checks: `ops` knows no recipes."""

from dataclasses import dataclass, field
from pathlib import Path

from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNeed:
    """Of the driver's machine."""

    concurrency: int = 8
    """Rollouts at once."""
    extras: tuple[str, ...] = ()
    """Extras of the distribution that must be installed."""
    has_sandbox: bool = True
    """Whether trials run in bubblewrap."""
    directories: tuple[Path, ...] = ()
    """Where files of a run go, beside the directory of the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNeed:
    """Of the training service."""

    is_required: bool = False
    """Whether there is no run without it."""
    hardware: str = "H200"
    num_gpus: int = 0
    comment: str | None = None
    """Of the recipe's jobs; None is the environment's or the default one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerNeed:
    """Of the sampler."""

    max_context_tokens: int
    temperature: float
    max_tokens: int
    """Of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeed:
    """What a trial of the recipe is made of. Picklable: it goes to a process of its own."""

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    agent: AgentChoice = field(default_factory=AgentChoice)
    environment: EnvironmentChoice = field(default_factory=EnvironmentChoice)
    deadlines: Deadlines = field(default_factory=Deadlines)
    reward_key: str = "reward"
