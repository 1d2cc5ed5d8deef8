"""Agents that are not ours: whole Harbor trials through the proxy, each recorded token by token."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import SamplerCall, ScriptedSampler
from tests.rollouts.rig import Turn, policy, request_for, write_task

from pilotage.algorithms import to_samples
from pilotage.rollouts.routes import Route
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import MINI_SWE_AGENT, AgentChoice, Deadlines, EnvironmentChoice
from pilotage.types import Outcome, Rollout, Task

pytestmark = pytest.mark.agents

SOLVE = "echo '{}' > /logs/agent/locations.json; echo solved"
LOOK: Turn = ("terminal", {"command": "ls pkg"})
HAND_IN: Turn = ("terminal", {"command": SOLVE})


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "tasks")


async def run(
    task: Task, agent: AgentChoice, *turns: Turn, **fields: Any
) -> tuple[Rollout, list[SamplerCall]]:
    """Run one trial of `agent` with a policy that says `turns`."""
    trials = task.path.parent.parent / "trials"
    settings = RunnerSettings(trials_directory=trials, workers=0, agent=agent, **fields)
    async with policy(*turns) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        rollout = await runner.run(request_for(task))
        sampler = proxy._policy.sampler
    assert isinstance(sampler, ScriptedSampler)
    return rollout, sampler.calls


def check(rollout: Rollout, calls: list[SamplerCall], *, turns: int) -> None:
    """It was rewarded; its ids and contexts are the sampler's; one branch; each token is trained once."""
    assert rollout.failure is None
    assert (rollout.outcome, rollout.attempt) == (Outcome.COMPLETED, 0)
    assert rollout.reward is not None
    assert rollout.reward.value == 1.0
    trajectory = rollout.trajectory
    assert len(trajectory.turns) == len(calls) == turns
    for index, (turn, call) in enumerate(zip(trajectory.turns, calls, strict=True)):
        assert call.completion_ids is not None
        assert turn.is_delivered
        assert turn.completion_ids.tolist() == call.completion_ids.tolist()
        assert trajectory.prompt_ids(index).tolist() == call.prompt_ids.tolist()
    assert len(trajectory.leaves()) == 1
    assert list(trajectory.branch_causes()) == []
    [sample] = to_samples(trajectory, sequence_id="r", group_id="g", advantage=1.0)
    assert sample.trained_tokens == trajectory.sampled_tokens


@pytest.mark.parametrize("name", ["AnthropicTerminal", "ResponsesTerminal"])
async def test_an_agent_of_ones_own_on_another_sdk(task: Task, name: str) -> None:
    agent = AgentChoice(name=f"tests.rollouts.sdk_agents:{name}")
    broken: Turn = ("terminal", '{"command": "ls')
    check(*await run(task, agent, LOOK, broken, HAND_IN, "I am done."), turns=4)


def keystrokes(text: str = "", *, is_complete: bool = False) -> str:
    """Return what terminus-2 expects a model to write."""
    commands = [{"keystrokes": f"{text}\n", "duration": 0.3}] if text else []
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": is_complete})


async def test_terminus_2_by_harbors_name(task: Task) -> None:
    options = {"record_terminal_session": False, "enable_summarize": False}
    agent = AgentChoice(name="terminus-2", options=options)
    done = keystrokes(is_complete=True)
    rollout, calls = await run(task, agent, keystrokes("ls pkg"), keystrokes(SOLVE), done, done)
    check(rollout, calls, turns=4)


async def test_mini_swe_agent_on_the_driver(task: Task) -> None:
    look, broken = ("bash", {"command": "ls pkg; exit 3"}), ("bash", {"command": "sleep 30"})
    hand_in = ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    agent = AgentChoice(name=MINI_SWE_AGENT, options={"command_timeout_s": 1.0})
    rollout, calls = await run(task, agent, look, broken, ("bash", {"command": SOLVE}), hand_in)
    check(rollout, calls, turns=4)
    assert rollout.facts["stop_reason"] == "finished"


async def test_mini_swe_agents_budget_is_the_rollouts(task: Task) -> None:
    agent = AgentChoice(name=MINI_SWE_AGENT)
    rollout, _ = await run(task, agent, *[("bash", {"command": f"echo {n}"}) for n in range(5)], max_turns=2)
    assert (rollout.outcome, len(rollout.trajectory.turns)) == (Outcome.TURNS_EXHAUSTED, 2)


async def test_mini_swe_agent_leaves_when_its_time_is_over(task: Task) -> None:
    agent = AgentChoice(name=MINI_SWE_AGENT, options={"command_timeout_s": 50.0})
    sleep: Turn = ("bash", {"command": "sleep 40"})
    rollout, _ = await run(task, agent, sleep, sleep, deadlines=Deadlines(agent_s=4.0))
    assert (rollout.outcome, rollout.timings_s["total"] < 20) == (Outcome.AGENT_TIMEOUT, True)


@pytest.mark.slow
async def test_openhands_sdk_inside_the_sandbox_through_a_relay(task: Task) -> None:
    agent = AgentChoice(
        name="openhands-sdk",
        options={"version": "1.58.2", "max_iterations": 8, "load_skills": False},
        route=Route.RELAY,
    )
    inside = EnvironmentChoice(options={"shown_directories": {"/opt/openhands-sdk-venv": sys.prefix}})
    finish: Turn = ("finish", {"message": "done"})
    rollout, calls = await run(task, agent, LOOK, HAND_IN, finish, environment=inside)
    check(rollout, calls, turns=3)


def program(name: str, directory: Path) -> EnvironmentChoice:
    """Return a sandbox that shows the native program `name` of this machine, or skip the test."""
    found = shutil.which(name)
    if found is None or Path(found).read_bytes()[:4] != b"\x7fELF":
        pytest.skip(f"needs the native program {name} on PATH")
    directory.mkdir()
    shutil.copy(Path(found).resolve(), directory / name)
    return EnvironmentChoice(options={"shown_directories": {"/usr/local/bin": str(directory)}})


LARGE = "memory_mb = 200000\n"
"""Address space: the run times of these programs reserve far more than they use."""


async def test_an_agent_that_speaks_messages_inside_the_sandbox_through_a_relay(tmp_path: Path) -> None:
    name = "claude-code"
    inside = program(name.removesuffix("-code"), tmp_path / "bin")
    look: Turn = ("Bash", {"command": "ls pkg", "description": "look"})
    solve: Turn = ("Bash", {"command": SOLVE, "description": "solve"})
    task = write_task(tmp_path / "tasks", environment_toml=LARGE)
    agent = AgentChoice(name=name, route=Route.RELAY)
    check(*await run(task, agent, look, solve, "I am done.", environment=inside), turns=3)


async def test_an_agent_that_speaks_responses_inside_the_sandbox_through_a_relay(tmp_path: Path) -> None:
    inside = program("codex", tmp_path / "bin")
    # Both would offer tools that only OpenAI's own service runs.
    config = {"web_search": "disabled", "features": {"multi_agent": False}}
    task = write_task(tmp_path / "tasks", environment_toml=LARGE)
    agent = AgentChoice(name="codex", options={"config": config}, route=Route.RELAY)
    look: Turn = ("exec_command", {"cmd": "ls pkg"})
    solve: Turn = ("exec_command", {"cmd": SOLVE})
    check(*await run(task, agent, look, solve, "I am done.", environment=inside), turns=3)
