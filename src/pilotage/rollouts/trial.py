"""Run one Harbor trial from a picklable specification to a picklable report.

Both paths, in this process and in a worker, go through `run_trial`. Invariant: it returns a report whatever
Harbor, the agent or the verifier do, raises only when cancelled, and leaves no environment running and,
unless asked to keep it, no trial directory.
"""

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotage.errors import RewardError
from pilotage.rollouts.limits import Slots
from pilotage.rollouts.register import Holding, Register, current_process, remove_tree
from pilotage.rollouts.report import AgentFacts, TrialFault, TrialPhase, TrialReport
from pilotage.rollouts.rewards import read_reward
from pilotage.rollouts.routes import Route, relay_port
from pilotage.rollouts.third_party import prepare
from pilotage.types import SessionAccess

if TYPE_CHECKING:
    from harbor.models.trial.config import AgentConfig, TrialConfig
    from harbor.models.trial.result import TimingInfo, TrialResult
    from harbor.trial.trial import Trial

OPENHANDS_AGENT = "pilotage.rollouts:OpenHandsHarborAgent"
MINI_SWE_AGENT = "pilotage.rollouts:MiniSweHarborAgent"
HOST_ENVIRONMENT = "pilotage.rollouts:HostEnvironment"

_KEY_VARIABLES = {"openai": ("OPENAI_API_KEY", "LLM_API_KEY"), "anthropic": ("ANTHROPIC_API_KEY",)}
"""Where Harbor's agents look for the key of a provider."""
OUR_AGENTS = (OPENHANDS_AGENT, MINI_SWE_AGENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChoice:
    """Which agent runs, and its own options."""

    name: str = OPENHANDS_AGENT
    """`module:Class`, or the name of one of Harbor's agents."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to the agent's constructor. A `module:Class` agent also gets `base_url`, `api_key_variable`
    (the environment variable that holds the key) and, if it is ours, `max_turns`."""
    route: Route = Route.DRIVER
    """How it reaches the proxy."""
    skills: tuple[Path, ...] = ()
    """Directories with a SKILL.md, for agents that take skills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChoice:
    """Where the trial runs."""

    name: str = HOST_ENVIRONMENT
    """`module:Class`, or one of Harbor's environment types."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to the environment's constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds per phase; None leaves a phase to the task."""

    agent_s: float | None = None
    verifier_s: float | None = None
    trial_s: float = 3600.0
    """Of the whole trial, whatever it hangs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One attempt at one task."""

    name: str
    """Unique on this machine; names the trial directory and the sandbox."""
    task_path: Path
    trials_directory: Path
    access: SessionAccess
    agent: AgentChoice
    environment: EnvironmentChoice
    deadlines: Deadlines
    max_turns: int
    reward_key: str
    keep_directory: bool = False

    @property
    def directory(self) -> Path:
        """The trial directory that Harbor fills."""
        return self.trials_directory / self.name


class _Phases:
    """Takes the slot of each phase as a trial comes to it, and stops the trial's clock while it waits."""

    def __init__(self, slots: Slots | None, deadline: asyncio.Timeout) -> None:
        self._slots = slots
        self._deadline = deadline
        self.has_early_fault = False
        """Whether something had failed when the verifier began; Harbor's times say it only while nobody sets
        the machine's clock."""

    async def enter(self, phase: TrialPhase) -> None:
        if self._slots is None:
            return
        ends_at = self._deadline.when()
        assert ends_at is not None
        started = asyncio.get_running_loop().time()
        self._deadline.reschedule(None)
        await self._slots.enter(phase)
        self._deadline.reschedule(ends_at + asyncio.get_running_loop().time() - started)

    def follow(self, trial: "Trial") -> None:
        """Enter and leave phases with the trial's events. Harbor's own deadlines are of what comes after."""
        from harbor.trial.hooks import TrialEvent

        async def agent(event: object) -> None:
            await self.enter(TrialPhase.AGENT)

        async def agent_is_done(event: object) -> None:
            if self._slots is not None:
                await self._slots.leave()

        async def verifier(event: object) -> None:
            self.has_early_fault = trial.result.exception_info is not None
            await self.enter(TrialPhase.VERIFIER)

        trial.add_hook(TrialEvent.AGENT_START, agent)
        trial.add_hook(TrialEvent.AGENT_END, agent_is_done)
        trial.add_hook(TrialEvent.VERIFICATION_START, verifier)


async def run_trial(spec: TrialSpec, slots: Slots | None = None) -> TrialReport:
    """Run the trial and report what happened.

    Args:
        slots: of the phases; None, and nothing waits. What is held at the end is the giver's to take back.

    Raises:
        asyncio.CancelledError: as usual, after the environment was stopped.
    """
    started = time.monotonic()
    register = Register()
    holding = Holding(id=f"trial-{spec.name}", owner=current_process(), tree=str(spec.directory.absolute()))
    register.write(holding)
    try:
        report = await _attributed(spec, slots)
    finally:
        # A thread of its own, so that a second cancellation, of a worker that closes, cannot part the two.
        await asyncio.shield(asyncio.to_thread(_let_go, register, holding, keep=spec.keep_directory))
    report.timings_s["total"] = time.monotonic() - started
    return report


def _let_go(register: Register, holding: Holding, *, keep: bool) -> None:
    if not keep:
        remove_tree(Path(holding.tree))
    register.remove(holding.id)


async def _attributed(spec: TrialSpec, slots: Slots | None) -> TrialReport:
    """The boundary: whatever escapes from Harbor becomes a fault of the trial."""
    key_variable = f"PILOTAGE_KEY_{spec.name}"
    os.environ[key_variable] = spec.access.api_key  # by name: Harbor writes an agent's options to disk
    try:
        async with asyncio.timeout(spec.deadlines.trial_s) as deadline:
            phases = _Phases(slots, deadline)
            await phases.enter(TrialPhase.ENVIRONMENT)
            result = await _run_harbor(spec, key_variable, phases)
            return _report(result, spec, has_early_fault=phases.has_early_fault)
    except TimeoutError:
        message = f"the trial took longer than {spec.deadlines.trial_s:g} s in all"
        return _faulty(TrialPhase.ENVIRONMENT, "TrialTimeoutError", message)
    except Exception as error:  # noqa: BLE001  # the one place where Harbor's failures are attributed
        return _faulty(TrialPhase.ENVIRONMENT, type(error).__name__, str(error), traceback.format_exc())
    finally:
        os.environ.pop(key_variable, None)


def _faulty(phase: TrialPhase, kind: str, message: str, trace: str = "") -> TrialReport:
    return TrialReport(fault=TrialFault(phase=phase, kind=kind, message=message, traceback=trace))


async def _run_harbor(spec: TrialSpec, key_variable: str, phases: _Phases) -> "TrialResult":
    prepare()
    from harbor.trial.trial import Trial

    trial = await Trial.create(_trial_config(spec, key_variable))
    phases.follow(trial)
    if spec.agent.route is Route.DRIVER:
        return await trial.run()
    async with contextlib.AsyncExitStack() as stack:
        _open_route_for_agent(trial, spec, stack)
        return await trial.run()


def _open_route_for_agent(trial: "Trial", spec: TrialSpec, stack: contextlib.AsyncExitStack) -> None:
    """Open the route before the agent runs, and close it afterwards; `stack` closes it whatever happens."""
    from harbor.trial.hooks import TrialEvent

    from pilotage.rollouts.relay import Relay, check_address

    async def open_route(event: object) -> None:
        if spec.agent.route is Route.ADDRESS:
            return await check_address(trial.agent_environment, spec.access.base_url)
        relay = Relay(trial.agent_environment, base_url=spec.access.base_url, port=relay_port(spec.name))
        await stack.enter_async_context(relay)

    async def close_route(event: object) -> None:
        await stack.aclose()

    trial.add_hook(TrialEvent.AGENT_START, open_route)
    trial.add_hook(TrialEvent.AGENT_END, close_route)


def _trial_config(spec: TrialSpec, key_variable: str) -> "TrialConfig":
    from harbor.agents.factory import AgentFactory
    from harbor.agents.installed.base import BaseInstalledAgent
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.trial.config import EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig

    agent = _agent_config(spec, key_variable)
    options = dict(spec.environment.options)
    if spec.environment.name == HOST_ENVIRONMENT and agent.env:
        agent_class = AgentFactory.get_agent_class_from_config(agent)
        if not issubclass(agent_class, BaseInstalledAgent):
            options["withheld_variables"] = sorted(agent.env)  # it calls the model from this process
    is_path = ":" in spec.environment.name
    environment = EnvironmentConfig(
        type=None if is_path else EnvironmentType(spec.environment.name),
        import_path=spec.environment.name if is_path else None,
        kwargs=options,
    )
    return TrialConfig(
        task=TaskConfig(path=spec.task_path),
        trial_name=spec.name,
        trials_dir=spec.trials_directory,
        agent=agent,
        environment=environment,
        verifier=VerifierConfig(override_timeout_sec=spec.deadlines.verifier_s),
    )


def _agent_config(spec: TrialSpec, key_variable: str) -> "AgentConfig":
    from harbor.agents.factory import AgentFactory
    from harbor.models.model_api_format import ModelApiFormat
    from harbor.models.trial.config import AgentConfig

    model = f"openai/{spec.access.model}"
    skills: list[str | Path] = [skill.absolute() for skill in spec.agent.skills]
    if ":" in spec.agent.name:
        endpoint = {"base_url": _base_url(spec), "api_key_variable": key_variable}
        budget = {"max_turns": spec.max_turns} if spec.agent.name in OUR_AGENTS else {}
        return AgentConfig(
            import_path=spec.agent.name,
            model_name=model,
            override_timeout_sec=spec.deadlines.agent_s,
            kwargs={**endpoint, **budget, **spec.agent.options},
            skills=skills,
        )
    config = AgentConfig(
        name=spec.agent.name,
        override_timeout_sec=spec.deadlines.agent_s,
        kwargs=dict(spec.agent.options),
        skills=skills,
    )
    connection = AgentFactory.get_agent_class_from_config(config).MODEL_CONNECTION
    if connection is None:
        return config  # oracle and nop: they call no model
    speaks_anthropic = ModelApiFormat.ANTHROPIC_MESSAGES in connection.supported_api_formats
    speaks_openai = not connection.supported_api_formats or {*connection.supported_api_formats} & {
        ModelApiFormat.OPENAI_CHAT_COMPLETIONS,
        ModelApiFormat.OPENAI_RESPONSES,
    }
    provider = "anthropic" if speaks_anthropic and not speaks_openai else "openai"
    return config.model_copy(
        update={
            "model_name": f"{provider}/{spec.access.model}",
            # Clients of Messages append /v1 themselves.
            "base_url": _base_url(spec).removesuffix("/v1" if provider == "anthropic" else ""),
            "env": dict.fromkeys(_KEY_VARIABLES[provider], spec.access.api_key),
        }
    )


def _base_url(spec: TrialSpec) -> str:
    """Return where the agent finds the proxy."""
    if spec.agent.route is Route.RELAY:
        return f"http://127.0.0.1:{relay_port(spec.name)}/v1"
    return spec.access.base_url


def _report(result: "TrialResult", spec: TrialSpec, *, has_early_fault: bool) -> TrialReport:
    fault = _fault(result, has_early_fault=has_early_fault)
    agent_result = result.agent_result
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    reward, problem = None, ""
    if result.verifier is not None and result.verifier.started_at is not None:
        try:
            reward = read_reward(spec.directory / "verifier", key=spec.reward_key, harbor_rewards=rewards)
        except RewardError as error:
            problem = str(error)
    return TrialReport(
        fault=fault,
        reward=reward,
        reward_problem=problem,
        agent=AgentFacts.from_metadata(agent_result.metadata if agent_result is not None else None),
        timings_s={
            "environment": _seconds(result.environment_setup),
            "agent": _seconds(result.agent_setup) + _seconds(result.agent_execution),
            "verifier": _seconds(result.verifier),
        },
    )


def _fault(result: "TrialResult", *, has_early_fault: bool) -> TrialFault | None:
    info = result.exception_info
    if info is None:
        return None
    if result.verifier is not None and not has_early_fault:
        phase = TrialPhase.VERIFIER
    elif result.agent_setup is not None:
        phase = TrialPhase.AGENT
    else:
        phase = TrialPhase.ENVIRONMENT
    return TrialFault(
        phase=phase,
        kind=info.exception_type,
        message=info.exception_message,
        traceback=info.exception_traceback,
    )


def _seconds(timing: "TimingInfo | None") -> float:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return max(0.0, (timing.finished_at - timing.started_at).total_seconds())  # the clock may have been set
