"""MCP servers: in real trials the OpenHands agent gets their tools, and one that fails is no silence."""

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.fakes import ScriptedSampler, WordRenderer
from tests.rollouts.rig import HAND_IN, Turn, policy, request_for, write_task

from pilotage.rollouts.mcp_servers import McpServer
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import AgentChoice
from pilotage.types import Outcome, Rollout

SERVER = Path(__file__).with_name("counting_server.py")
COUNTING: dict[str, object] = {"command": sys.executable, "args": [str(SERVER)]}
COUNT: Turn = ("count_letters", {"word": "harbor"})


async def run(tmp_path: Path, **servers: dict[str, object]) -> tuple[Rollout, list[str]]:
    """Return the rollout, and the text that the policy read before each turn."""
    task = write_task(tmp_path / "tasks")
    options = {"tools": ("localization_finish",), "driver_mcp_servers": servers}
    settings = RunnerSettings(
        trials_directory=tmp_path / "trials", agent=AgentChoice(options=options), workers=0
    )
    async with policy(COUNT, HAND_IN) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        rollout = await runner.run(request_for(task))
        sampler, renderer = proxy._policy.sampler, proxy._policy.renderer
    assert isinstance(sampler, ScriptedSampler)
    assert isinstance(renderer, WordRenderer)
    return rollout, [renderer.decode(call.prompt_ids) for call in sampler.calls]


def running() -> list[int]:
    """Processes of the server."""
    lines = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if _runs_server(path)]
    return [int(pid) for pid in lines]


def _runs_server(cmdline: Path) -> bool:
    try:
        return bytes(SERVER) in cmdline.read_bytes()
    except OSError:
        return False  # it has ended


@pytest.mark.agents
async def test_the_agent_calls_a_servers_tool_and_the_server_ends_with_the_trial(tmp_path: Path) -> None:
    rollout, (first, second) = await run(tmp_path, counting=COUNTING)

    assert rollout.failure is None
    assert rollout.outcome == Outcome.COMPLETED
    assert "count_letters" in first
    assert "harbor_has_6_letters" in second
    assert running() == []


@pytest.mark.agents
@pytest.mark.parametrize("others", [{}, {"counting": COUNTING}])
async def test_a_server_that_does_not_start_is_an_environments_fault(
    tmp_path: Path, others: dict[str, dict[str, object]]
) -> None:
    rollout, prompts = await run(tmp_path, bad={"command": "/no/such/program"}, **others)

    assert rollout.outcome == Outcome.ENVIRONMENT_ERROR
    assert rollout.failure is not None
    assert "the MCP server bad did not start: " in rollout.failure.message
    assert prompts == []  # no turn without the tools that the recipe asks for
    assert running() == []


@pytest.mark.parametrize(
    "fields", [{}, {"command": "a", "url": "http://b"}, {"url": "http://b", "args": ["c"]}]
)
def test_a_server_is_a_program_or_an_address(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="has a command, with args, or else a url"):
        McpServer.model_validate(fields)
