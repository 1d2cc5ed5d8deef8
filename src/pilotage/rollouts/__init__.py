"""Rollouts: one Harbor trial per attempt, in a sandbox, with an agent that talks to a session at the proxy.

Invariant: `HarborRunner.run` returns exactly one finished rollout with exactly one declared outcome, and
whatever ends it, no process, terminal, mount or directory of the trial is left. This package does not sample,
record tokens or train, and it writes no run directory.

Names are loaded when they are first used: Harbor and the OpenHands SDK take seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotage.rollouts.host_environment import HostEnvironment
    from pilotage.rollouts.limits import TrialLimits
    from pilotage.rollouts.mini_swe_agent import MiniSweHarborAgent
    from pilotage.rollouts.openhands_agent import OpenHandsHarborAgent
    from pilotage.rollouts.register import SweepReport, sweep
    from pilotage.rollouts.rewards import read_reward
    from pilotage.rollouts.runner import HarborRunner, RunnerSettings, check_settings
    from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice

__all__ = [
    "AgentChoice",
    "Deadlines",
    "EnvironmentChoice",
    "HarborRunner",
    "HostEnvironment",
    "MiniSweHarborAgent",
    "OpenHandsHarborAgent",
    "RunnerSettings",
    "SweepReport",
    "TrialLimits",
    "check_settings",
    "read_reward",
    "sweep",
]

_HOMES = {
    "AgentChoice": "trial",
    "Deadlines": "trial",
    "EnvironmentChoice": "trial",
    "HarborRunner": "runner",
    "HostEnvironment": "host_environment",
    "MiniSweHarborAgent": "mini_swe_agent",
    "OpenHandsHarborAgent": "openhands_agent",
    "RunnerSettings": "runner",
    "SweepReport": "register",
    "TrialLimits": "limits",
    "check_settings": "runner",
    "read_reward": "rewards",
    "sweep": "register",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pilotage.rollouts.third_party import prepare

    prepare()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
