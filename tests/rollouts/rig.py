"""Toy Harbor tasks, and a policy that follows a script behind a real proxy on a real socket."""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from tests.fakes import ASSISTANT, Script, ScriptedSampler, WordRenderer

from pilotage.proxy import ChatCompletionsProxy, Patience, serve
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.types import Rollout, RolloutRequest, SamplingParams, Task, TokenIds

TASK_TOML = """schema_version = "1.4"
[task]
name = "toy/{name}"
description = "A toy."
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 30.0
[environment]
workdir = "/workspace"
{extra}
"""
MODULE = """class Alpha:
    def beta(self, x):
        return gamma(x)


def gamma(x):
    return x + 1
"""
REWARD_IF_HANDED_IN = """#!/bin/bash
if [ -f /logs/agent/locations.json ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = """#!/bin/bash
echo '{"locations": [{"file": "pkg/mod.py"}]}' > /logs/agent/locations.json
"""


def write_task(
    root: Path, name: str = "toy", *, test_sh: str = REWARD_IF_HANDED_IN, environment_toml: str = ""
) -> Task:
    """Write a task whose verifier rewards any hand-in, and whose gold lies in tests/."""
    path = root / name
    files = {
        "task.toml": TASK_TOML.format(name=name, extra=environment_toml),
        "instruction.md": "Find the place of the bug.\n",
        "environment/pkg/mod.py": MODULE,
        "tests/test.sh": test_sh,
        "tests/gold.json": '{"secret": "GOLD"}',
        "solution/solve.sh": SOLVE,
    }
    for relative, text in files.items():
        target = path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if target.suffix == ".sh":
            target.chmod(0o755)
    return Task(id=f"toy/{name}", path=path)


type Call = tuple[str, dict[str, Any] | str]
type Turn = Call | list[Call] | str | Exception
"""A call (name, arguments), several at once, plain text, or what the sampler raises."""


def script_of(renderer: WordRenderer, turns: list[Turn]) -> Callable[[TokenIds], Script]:
    """Return a script by turn of the conversation, so that any number of rollouts may share it."""

    def reply(prompt: TokenIds) -> Script:
        turn = turns[int((prompt == ASSISTANT).sum()) - 1]
        if isinstance(turn, Exception):
            return turn
        if isinstance(turn, str):
            return renderer.reply(turn)
        calls = turn if isinstance(turn, list) else [turn]
        texts = [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]
        return renderer.reply("", *texts)

    return reply


@contextlib.asynccontextmanager
async def policy(
    *turns: Turn, max_context_tokens: int = 1 << 20, latency_s: float | None = None
) -> AsyncGenerator[ChatCompletionsProxy]:
    """Serve a policy that says `turns`, one after another, in every rollout."""
    renderer = WordRenderer()
    sampler = ScriptedSampler(
        script=script_of(renderer, list(turns)), max_context_tokens=max_context_tokens, latency_s=latency_s
    )
    impatient = Patience(weights_wait_s=0.05, max_attempts=1, backoff_s=0.001)
    proxy = ChatCompletionsProxy(sampler, renderer, patience=impatient)
    async with serve(proxy):
        yield proxy


HAND_IN: Call = ("localization_finish", {"locations": [{"file": "pkg/mod.py", "function_name": "gamma"}]})


def request_for(task: Task, rollout_id: str = "rollout-1") -> RolloutRequest:
    return RolloutRequest(id=rollout_id, group_id="group", task=task, sampling=SamplingParams(seed=1))


async def run_one(
    task: Task, *turns: Turn, settings: RunnerSettings, max_context_tokens: int = 1 << 20
) -> Rollout:
    """Run one rollout."""
    async with (
        policy(*turns, max_context_tokens=max_context_tokens) as proxy,
        HarborRunner(sessions=proxy, settings=settings) as runner,
    ):
        return await runner.run(request_for(task))
