"""`HarborRunner`: one attempt after another at a task, each a Harbor trial with a session of its own."""

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from pilotage.errors import ConfigError
from pilotage.interfaces import SessionHost
from pilotage.rollouts.environments import check_environment
from pilotage.rollouts.limits import PoolSlots, StartLimit, TrialLimits
from pilotage.rollouts.local_workers import LocalWorkers
from pilotage.rollouts.outcomes import decide, invalid_submission
from pilotage.rollouts.register import sweep
from pilotage.rollouts.report import TrialReport
from pilotage.rollouts.routes import Route, check_route
from pilotage.rollouts.skills import check_skills
from pilotage.rollouts.trial import (
    OUR_AGENTS,
    AgentChoice,
    Deadlines,
    EnvironmentChoice,
    TrialSpec,
    run_trial,
)
from pilotage.rollouts.workers import TrialWorkers, WorkerPool
from pilotage.types import (
    OUTCOME_RULES,
    Outcome,
    Reward,
    Rollout,
    RolloutRequest,
    SessionAccess,
    SessionRecord,
    SessionSpec,
)

_KEY_GRACE_S = 120.0
"""A key outlives its trial's deadline by this much, for teardown."""
_MODELLESS_AGENTS = frozenset({"nop", "oracle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How rollouts are run; the same for all of a run."""

    trials_directory: Path
    agent: AgentChoice = field(default_factory=AgentChoice)
    environment: EnvironmentChoice = field(default_factory=EnvironmentChoice)
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_turns: int = 10
    """Model calls of one rollout; the agent stops there, and the proxy answers no more."""
    reward_key: str = "reward"
    expects_hand_in: bool = False
    """Whether a rollout that does not pass the submission gate is `submission_invalid`."""
    submission_floor: float | None = None
    """Reward of those; None leaves them the verifier's."""
    concurrency: int = 8
    """Rollouts that run at once, whatever their phase; further ones wait."""
    limits: TrialLimits = field(default_factory=TrialLimits)
    """Of their phases, and of how fast they start."""
    workers: int = 2
    """Processes that run trials; 0 runs them in this one."""
    keep_trials: bool = False
    """Whether trial directories stay for a person to read."""


def check_settings(settings: RunnerSettings) -> None:
    """Raise ConfigError where no rollout could run: environment, skills, or the agent's way to the proxy."""
    agent, environment = settings.agent, settings.environment
    if agent.name not in OUR_AGENTS or agent.route is not Route.DRIVER:
        check_route(agent.name, agent.route)
    if environment.options.get("unsandboxed") and agent.route is Route.RELAY:
        raise ConfigError('an unsandboxed agent reaches the proxy itself: set agent_route = "address"')
    check_skills(agent)
    check_environment(environment)


class HarborRunner:
    """Runs rollouts; use it as an async context manager, which sweeps first and stops the workers last."""

    def __init__(
        self, *, sessions: SessionHost, settings: RunnerSettings, pool: WorkerPool | None = None
    ) -> None:
        """Start nothing yet; trials run in `pool`, or in `settings.workers` processes of this machine."""
        self._sessions = sessions
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._pools = settings.limits.pools()
        self._starts = StartLimit(settings.limits.starts_per_s)
        self._runs_here = pool is None
        if pool is None and settings.workers:
            pool = LocalWorkers(settings.workers)
        self._workers = TrialWorkers(pool) if pool is not None else None

    async def __aenter__(self) -> Self:
        """Clear what dead drivers left, check the sandbox and the agent's route, and start the workers.

        Raises:
            ConfigError: the environment cannot be used where trials run, or the agent cannot reach the proxy
                from it.
        """
        await asyncio.to_thread(sweep)
        if self._runs_here:  # else their pool looks where they run
            await asyncio.to_thread(check_settings, self._settings)
        if self._workers is not None:
            await self._workers.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            await asyncio.shield(self._workers.close())

    async def run(self, request: RolloutRequest) -> Rollout:
        """Return exactly one finished rollout; raises only when cancelled.

        A fault of the machinery is tried again, in a new session, as often as the table of outcomes says.
        """
        async with self._slots:
            attempt = 0
            discarded: Counter[str] = Counter()
            while True:
                rollout = await self._attempt(request, attempt)
                if attempt >= OUTCOME_RULES[rollout.outcome].max_retries:
                    return replace(rollout, discarded_tokens=dict(discarded))
                discarded[rollout.outcome.value] += rollout.trajectory.sampled_tokens
                attempt += 1

    async def _attempt(self, request: RolloutRequest, attempt: int) -> Rollout:
        settings = self._settings
        await self._starts.wait()
        access = self._sessions.open(
            SessionSpec(
                rollout_id=request.id if attempt == 0 else f"{request.id}-retry-{attempt}",
                sampling=request.sampling,
                ttl_s=settings.deadlines.trial_s + _KEY_GRACE_S,
                max_turns=settings.max_turns,
            )
        )
        try:
            report = await self._run_trial(self._spec(request, attempt, access))
        except BaseException:
            await asyncio.shield(self._sessions.close(access))
            raise
        record = await asyncio.shield(self._sessions.close(access))
        return _rollout(request, attempt, report, record, settings)

    async def _run_trial(self, spec: TrialSpec) -> TrialReport:
        # The time that a trial waits for a slot is not the trial's, and its key must outlive it all the same.
        slots = PoolSlots(self._pools, partial(self._sessions.prolong, spec.access))
        try:
            run = self._workers.run if self._workers is not None else run_trial
            report = await run(spec, slots)
        finally:
            slots.release()
        if slots.waited_s is not None:
            report.timings_s["waiting"] = slots.waited_s
        return report

    def _spec(self, request: RolloutRequest, attempt: int, access: SessionAccess) -> TrialSpec:
        settings = self._settings
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.id)
        return TrialSpec(
            # Unique on the machine: two runs may use the same rollout ids.
            name=f"{readable}-{attempt}-{uuid.uuid4().hex[:8]}",
            task_path=request.task.path,
            trials_directory=settings.trials_directory,
            access=access,
            agent=settings.agent,
            environment=settings.environment,
            deadlines=settings.deadlines,
            max_turns=settings.max_turns,
            reward_key=settings.reward_key,
            keep_directory=settings.keep_trials,
        )


def _rollout(
    request: RolloutRequest,
    attempt: int,
    report: TrialReport,
    record: SessionRecord,
    settings: RunnerSettings,
) -> Rollout:
    verdict = decide(
        report,
        record,
        expects_hand_in=settings.expects_hand_in,
        calls_model=settings.agent.name not in _MODELLESS_AGENTS,
    )
    reward = report.reward if OUTCOME_RULES[verdict.outcome].has_reward else None
    if verdict.outcome == Outcome.SUBMISSION_INVALID and settings.submission_floor is not None:
        reward = Reward(value=settings.submission_floor, key="submission_floor", source="recipe")
    return Rollout(
        id=request.id,
        group_id=request.group_id,
        task_id=request.task.id,
        attempt=attempt,
        outcome=verdict.outcome,
        reward=reward,
        trajectory=record.trajectory,
        failure=verdict.failure,
        timings_s=report.timings_s,
        counters=record.counters,
        facts=_facts(report, record, settings.expects_hand_in),
    )


def _facts(report: TrialReport, record: SessionRecord, expects_hand_in: bool) -> Mapping[str, str]:
    agent = report.agent
    if agent is None:
        return {}
    facts = {
        "stop_reason": agent.stop_reason.value,
        "turns": str(agent.turns),
        "hand_in": agent.hand_ins[0] if agent.hand_ins else "",
        "hand_ins": str(len(agent.hand_ins)),
        "rejected_hand_ins": str(agent.rejected_hand_ins),
        "submission_fault": invalid_submission(agent, record) if expects_hand_in else "",
        "last_message": agent.last_message,
        "error": agent.error,
    }
    return {name: value for name, value in facts.items() if value}
