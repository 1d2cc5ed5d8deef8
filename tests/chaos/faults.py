"""The fault campaign: faults drawn by a seed from two tables, each struck for real and then judged.

Faults of rollouts go through one step of the training loop: a group of two for each, the first struck, the
second honest; real Harbor trials in real sandboxes, a real proxy on a real socket, a real run directory.
Faults of runs strike small runs of their own.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import run_faults, trial_faults
from tests.chaos.trial_faults import HONEST_REWARD, Plan
from tests.fakes import ASSISTANT, Script, ScriptedSampler, WordRenderer
from tests.loops.rig import CountingTrainer, Watcher
from tests.rollouts.rig import write_task

from pilotage.loops import LoopSettings, RunDirectory, TrainingLoop, read_rollout
from pilotage.loops.requests import group_requests, task_of_group
from pilotage.proxy import ChatCompletionsProxy, Patience, serve
from pilotage.rollouts import AgentChoice, Deadlines, HarborRunner, RunnerSettings
from pilotage.rollouts.register import Register
from pilotage.types import (
    OUTCOME_RULES,
    Completion,
    Outcome,
    Rollout,
    SamplingParams,
    SessionSpec,
    Task,
    TokenIds,
)

CONCURRENCY = 4
_MARK = "touch /logs/agent/struck"
"""The first call of a struck rollout; the verifier tells the two apart by it."""
_TEST_SH = """#!/bin/bash
if [ -e /logs/agent/struck ]; then
{verifier}
else
echo {reward} > /logs/verifier/reward.txt
fi
"""
_DEADLINES = Deadlines(agent_s=25.0, verifier_s=12.0, trial_s=90.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One fault, and what was not as it should be."""

    kind: str
    problems: list[str]


def draw(count: int, rng: random.Random) -> list[str]:
    """Draw the kinds of `count` faults; where there are enough, every kind comes."""
    kinds = [*trial_faults.KINDS, *run_faults.KINDS]
    drawn = [*kinds, *rng.choices(kinds, k=max(0, count - len(kinds)))]
    rng.shuffle(drawn)
    return drawn[:count]


class PlannedSampler:
    """Samples in each struck rollout what its plan says, and in all others that they are done."""

    max_context_tokens = 1 << 20
    weights_version = 1

    def __init__(self, plans: Mapping[str, Plan], renderer: WordRenderer) -> None:
        self._plans = plans
        self._renderer = renderer

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. A rollout that is tried again is struck again."""
        plan = self._plans.get(session_id.partition("-retry-")[0])
        acts = ["true"] if plan is None else [_MARK, *plan.acts]
        turn = int((prompt_ids == ASSISTANT).sum()) - 1
        script: Script = self._renderer.reply("done")
        if turn < len(acts):
            act = acts[turn]
            call = ("terminal", json.dumps({"command": act}))
            script = act if isinstance(act, Exception) else self._renderer.reply("", call)
        once = ScriptedSampler(script=iter([script]), weights_version=self.weights_version)
        return await once.sample(prompt_ids, params, session_id=session_id, turn_index=turn_index)


async def judge_trials(kinds: Sequence[str], root: Path, rng: random.Random) -> list[Judged]:
    """Strike one rollout for each of `kinds` and judge what came of it and of its sibling."""
    token = str(rng.randint(100_000, 999_999))  # seconds that these processes would sleep; marks them as ours
    plans = [trial_faults.KINDS[kind](rng, token) for kind in kinds]
    tasks = [
        write_task(
            root / "tasks",
            f"{number:04d}",
            test_sh=_TEST_SH.format(verifier=plan.verifier, reward=HONEST_REWARD),
            environment_toml=plan.environment_toml,
        )
        for number, plan in enumerate(plans)
    ]
    run = await _one_step(tasks, plans, root)
    rollouts = {rollout.id: rollout for rollout in map(read_rollout, run.rollout_files())}
    events = Counter((e["rollout"], e["outcome"]) for e in run.events() if e["event"] == "rollout_failed")
    by_task: dict[str, list[Rollout]] = {}
    for name in sorted(rollouts):
        by_task.setdefault(rollouts[name].task_id, []).append(rollouts[name])
    judged: list[Judged] = []
    for kind, plan, task in zip(kinds, plans, tasks, strict=True):
        group = by_task.get(task.id, [])
        problems = (
            list(_problems(plan, group, events)) if len(group) == 2 else [f"{len(group)} records, not 2"]
        )
        judged.append(Judged(kind=kind, problems=problems))
    left = [*_left_processes(token), *(f"register entry {h.id}" for h in Register().holdings())]
    left += [f"trial directory {path.name}" for path in (root / "trials").glob("*")]
    if left:
        judged.append(Judged(kind="leftovers", problems=left))
    return judged


async def _one_step(tasks: Sequence[Task], plans: Sequence[Plan], root: Path) -> RunDirectory:
    """Run one step of the loop over all tasks; the first rollout of each group has its task's plan."""
    settings = LoopSettings(num_steps=1, tasks_per_step=len(tasks), group_size=2)
    requests = [
        request
        for number in range(len(tasks))
        for request in group_requests(
            task_of_group(tasks, number, seed=settings.seed), number, settings=settings
        )
    ]
    plan_of = {task.id: plan for task, plan in zip(tasks, plans, strict=True)}
    struck = {request.id: plan_of[request.task.id] for request in requests[::2]}
    renderer = WordRenderer()
    impatient = Patience(weights_wait_s=0.05, max_attempts=1, backoff_s=0.001)
    proxy = ChatCompletionsProxy(PlannedSampler(struck, renderer), renderer, patience=impatient)
    async with serve(proxy):
        closed = proxy.open(
            SessionSpec(rollout_id="closed", sampling=SamplingParams(), ttl_s=60, max_turns=1)
        )
        await proxy.close(closed)
        agent = AgentChoice(name="tests.chaos.agents:Caller", options={"closed_key": closed.api_key})
        runner_settings = RunnerSettings(
            trials_directory=root / "trials",
            agent=agent,
            deadlines=_DEADLINES,
            max_turns=20,
            concurrency=CONCURRENCY,
            workers=0,
        )
        with RunDirectory.open(root / "run", {"name": "faults"}, resume=False) as run:
            async with HarborRunner(sessions=proxy, settings=runner_settings) as runner:
                loop = TrainingLoop(
                    trainer=CountingTrainer(),
                    runner=runner,
                    run=run,
                    train_tasks=tasks,
                    held_out_tasks=[],
                    settings=settings,
                    observer=Watcher(),
                )
                await loop.run()
    return run


def _problems(plan: Plan, group: Sequence[Rollout], events: Counter[tuple[str, str]]) -> Iterator[str]:
    """Say what of a struck rollout and its honest sibling is not as it should be."""
    struck, honest = group
    if struck.outcome is not plan.outcome:
        said = "" if struck.failure is None else f": {struck.failure.message[:200]}"
        yield f"it ended as {struck.outcome}, not {plan.outcome}{said}"
    reward = None if struck.reward is None else struck.reward.value
    if reward != plan.reward:
        yield f"its reward is {reward}, not {plan.reward}"
    turns = 1 + (len(plan.acts) + 1 if plan.turns is None else plan.turns)
    if len(struck.trajectory.turns) != turns:
        yield f"{len(struck.trajectory.turns)} turns were recorded, not {turns}"
    rule = OUTCOME_RULES[plan.outcome]
    if struck.attempt != rule.max_retries:
        yield f"it ended in attempt {struck.attempt}, not {rule.max_retries}"
    wanted = 0 if rule.has_reward else 1
    if events[struck.id, struck.outcome] != wanted:
        yield f"{events[struck.id, struck.outcome]} events name it, not {wanted}"
    if (
        honest.outcome is not Outcome.COMPLETED
        or honest.reward is None
        or honest.reward.value != HONEST_REWARD
    ):
        yield f"its sibling ended as {honest.outcome} with reward {honest.reward}"


def _left_processes(token: str) -> Iterator[str]:
    """Yield processes that sleep as long as this campaign's do."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in words:
            yield f"process {path.parent.name}: {b' '.join(words).decode(errors='replace')[:80]}"


async def campaign(count: int, *, seed: int, root: Path) -> list[Judged]:
    """Strike `count` faults and judge each.

    Args:
        root: an empty directory; the register is expected to be under it too (XDG_RUNTIME_DIR).
    """
    rng = random.Random(seed)
    kinds = draw(count, rng)
    judged = [
        Judged(kind=kind, problems=await run_faults.strike(kind, rng))
        for kind in kinds
        if kind in run_faults.KINDS
    ]
    of_trials = [kind for kind in kinds if kind in trial_faults.KINDS]
    return judged + (await judge_trials(of_trials, root, rng) if of_trials else [])
