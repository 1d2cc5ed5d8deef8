"""How agents inside an environment reach the proxy, and what is refused before the first rollout."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import ScriptedSampler, WordRenderer
from tests.rollouts.rig import policy, request_for, script_of, write_task

from pilotage.errors import ConfigError
from pilotage.proxy import ChatCompletionsProxy
from pilotage.recipes.config import PolicySettings, Recipe, RolloutSettings, TaskSettings
from pilotage.recipes.stack import open_runner
from pilotage.rollouts.routes import Route, check_route, relay_port
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import MINI_SWE_AGENT, OPENHANDS_AGENT, AgentChoice, EnvironmentChoice
from pilotage.types import Outcome, Rollout, Task

pytestmark = pytest.mark.agents

INSIDE = "tests.rollouts.sdk_agents:InsideShell"
CHAT = """curl -s $URL/chat/completions -H "authorization: Bearer $KEY" -d '{"messages": [%s]}'"""
GO = '{"role": "user", "content": "go"}'
SOLVE = "echo '{}' > /logs/agent/locations.json"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "tasks")


async def run(
    proxy: ChatCompletionsProxy,
    task: Task,
    command: str,
    *,
    route: Route = Route.RELAY,
    **environment: Any,
) -> Rollout:
    """Run `command` as the agent, in a sandbox that has no network but the relay."""
    settings = RunnerSettings(
        trials_directory=task.path.parent.parent / "trials",
        workers=0,
        agent=AgentChoice(name=INSIDE, options={"command": command}, route=route),
        environment=EnvironmentChoice(options=environment),
        keep_trials=True,
    )
    async with HarborRunner(sessions=proxy, settings=settings) as runner:
        return await runner.run(request_for(task))


def left_by_agent(task: Task, name: str) -> str:
    [file] = (task.path.parent.parent / "trials").glob(f"*/agent/{name}")
    return file.read_text()


@pytest.mark.parametrize(
    ("agent", "route", "complaint"),
    [
        ("claude-code", Route.DRIVER, "claude-code runs inside the environment and needs a declared route"),
        (INSIDE, Route.DRIVER, "runs inside the environment"),
        ("terminus-2", Route.RELAY, 'calls the model from this process: set agent_route = "driver"'),
        (OPENHANDS_AGENT, Route.ADDRESS, "calls the model from this process"),
        ("no-such-agent", Route.DRIVER, "no agent no-such-agent"),
        ("no.such.module:Agent", Route.DRIVER, "no agent no.such.module:Agent"),
    ],
)
async def test_an_agent_that_cannot_reach_the_proxy_is_refused_before_the_first_rollout(
    tmp_path: Path, agent: str, route: Route, complaint: str
) -> None:
    settings = RunnerSettings(
        trials_directory=tmp_path, workers=0, agent=AgentChoice(name=agent, route=route)
    )
    async with policy() as proxy:
        with pytest.raises(ConfigError) as caught:
            async with HarborRunner(sessions=proxy, settings=settings):
                pass
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("agent", "route"),
    [
        *[
            (agent, Route.RELAY)
            for agent in ("claude-code", "codex", "openhands-sdk", "mini-swe-agent", INSIDE)
        ],
        *[
            (agent, Route.DRIVER)
            for agent in ("terminus-2", "nop", "oracle", OPENHANDS_AGENT, MINI_SWE_AGENT)
        ],
        ("codex", Route.ADDRESS),
    ],
)
def test_agents_that_can_are_not(agent: str, route: Route) -> None:
    check_route(agent, route)


async def test_a_relay_carries_calls_out_of_a_sandbox_without_network_and_nothing_else(task: Task) -> None:
    wrong = CHAT.replace("$KEY", "other") % GO
    elsewhere = "curl -s ${URL%/v1}/elsewhere"
    commands = [CHAT % GO, wrong, elsewhere, "curl -s -m 5 http://127.0.0.1:1 || echo closed", SOLVE]
    async with policy("one") as proxy:
        rollout = await run(proxy, task, f"({'; echo; '.join(commands)}) > /logs/agent/seen")
    assert (rollout.outcome, len(rollout.trajectory.turns)) == (Outcome.COMPLETED, 1)
    answered, refused, not_carried, closed, *_ = left_by_agent(task, "seen").splitlines()
    assert '"content":"one"' in answered
    assert "names no open session" in refused
    assert not_carried == "the relay carries /v1/ alone"
    assert closed == "closed"


async def test_calls_through_a_relay_run_side_by_side(task: Task) -> None:
    texts = [GO.replace("go", text) for text in ("a", "b", "c")]
    calls = " & ".join(f"{CHAT % text} > /logs/agent/{n}" for n, text in enumerate(texts))
    async with policy("one", latency_s=0.5) as proxy:
        rollout = await run(proxy, task, f"{calls} & wait; {SOLVE}")
    starts = [turn.started_at for turn in rollout.trajectory.turns]
    assert len(starts) == 3
    assert max(starts) < min(turn.finished_at for turn in rollout.trajectory.turns)


async def test_a_client_that_leaves_a_relay_frees_the_sampler(task: Task) -> None:
    async with policy("one", latency_s=60) as proxy:
        rollout = await run(proxy, task, f"{(CHAT % GO).replace('-s', '-s -m 1')}; sleep 1; {SOLVE}")
        sampler = proxy._policy.sampler
    assert isinstance(sampler, ScriptedSampler)
    assert (sampler.num_started, sampler.num_cancelled) == (2, 2)  # a rollout without a turn is tried again
    assert rollout.trajectory.turns == ()


def without_python(tmp_path: Path) -> dict[str, str]:
    """Return a directory to show over that of the interpreter."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python3").write_text("#!/bin/bash\necho no python here >&2\nexit 127\n")
    (bin / "python3").chmod(0o755)
    return {str(Path(sys.base_prefix).resolve() / "bin"): str(bin)}


async def test_an_environment_that_cannot_relay_is_an_environment_error_that_says_why(
    task: Task, tmp_path: Path
) -> None:
    async with policy("one") as proxy:
        rollout = await run(proxy, task, CHAT % GO, shown_directories=without_python(tmp_path))
    assert rollout.outcome == Outcome.ENVIRONMENT_ERROR
    assert rollout.failure is not None
    assert "the relay does not work in this environment (it needs python3)" in rollout.failure.message
    assert "no python here" in rollout.failure.message


async def test_a_relay_that_breaks_while_the_agent_runs_is_not_the_agents_fault(task: Task) -> None:
    async with policy("one") as proxy:
        rollout = await run(proxy, task, f"{CHAT % GO}; rm -r /tmp/.pilotage-relay/work; sleep 2; {SOLVE}")
    assert rollout.outcome == Outcome.ENVIRONMENT_ERROR
    assert rollout.failure is not None
    assert "the relay broke while the agent ran" in rollout.failure.message


@pytest.mark.parametrize("network", ["the machine's", "its own"])
async def test_an_address_serves_where_the_network_is_shared_and_is_asked_for_where_it_is_not(
    tmp_path: Path, network: str
) -> None:
    is_shared = network == "the machine's"
    task = write_task(tmp_path / "tasks", environment_toml='network_mode = "public"' if is_shared else "")
    async with policy("one") as proxy:
        rollout = await run(proxy, task, f"{CHAT % GO}; {SOLVE}", route=Route.ADDRESS)
    if is_shared:
        assert (rollout.outcome, len(rollout.trajectory.turns)) == (Outcome.COMPLETED, 1)
    else:
        assert rollout.outcome == Outcome.ENVIRONMENT_ERROR
        assert rollout.failure is not None
        assert "/health does not answer inside the environment" in rollout.failure.message


@contextlib.asynccontextmanager
async def tunnel(host: str, port: int, to: str, to_port: int) -> AsyncGenerator[None]:
    """Carry connections from one address to another, as the far end of a reverse tunnel does."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(to, to_port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(carry, host, port):
        yield


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def inside(task: Task, **places: str) -> Recipe:
    command = f"{CHAT % GO}; echo $URL > /logs/agent/url; {SOLVE}"
    return Recipe(
        name="inside",
        policy=PolicySettings(model=task.path),
        tasks=TaskSettings(train=(task.path,)),
        rollouts=RolloutSettings(
            agent=INSIDE,
            agent_options={"command": command},
            agent_route=Route.ADDRESS,
            workers=0,
            keep_trials=True,
            **places,  # pyright: ignore[reportArgumentType]
        ),
    )


@pytest.mark.parametrize("is_tunnelled", [False, True])
async def test_an_agent_inside_calls_the_address_or_the_tunnel_that_a_recipe_names(
    tmp_path: Path, is_tunnelled: bool
) -> None:
    task = write_task(tmp_path / "tasks", environment_toml='network_mode = "public"')
    near, far = free_port("127.0.0.2"), free_port("127.0.0.3")
    url = f"http://127.0.0.3:{far}/v1" if is_tunnelled else f"http://127.0.0.2:{near}/v1"
    places = {"proxy_address": f"127.0.0.2:{near}"}
    places |= {"proxy_url": url.removesuffix("/v1")} if is_tunnelled else {}
    recipe = inside(task, **places)
    renderer = WordRenderer()
    sampler = ScriptedSampler(script=script_of(renderer, ["one"]))
    async with (
        tunnel("127.0.0.3", far, "127.0.0.2", near),
        open_runner(recipe, sampler, renderer, tmp_path / "trials") as runner,
    ):
        rollout = await runner.run(request_for(task))
    assert (rollout.outcome, len(rollout.trajectory.turns)) == (Outcome.COMPLETED, 1)
    assert left_by_agent(task, "url").strip() == url


async def test_a_tunnel_that_leads_nowhere_is_an_environment_error_that_says_what_to_set(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path / "tasks", environment_toml='network_mode = "public"')
    recipe = inside(task, proxy_url=f"http://127.0.0.3:{free_port('127.0.0.3')}")
    renderer = WordRenderer()
    sampler = ScriptedSampler(script=script_of(renderer, ["one"]))
    async with open_runner(recipe, sampler, renderer, tmp_path / "trials") as runner:
        rollout = await runner.run(request_for(task))
    assert rollout.outcome == Outcome.ENVIRONMENT_ERROR
    assert rollout.failure is not None
    assert "does not answer inside the environment" in rollout.failure.message
    assert "proxy_url" in rollout.failure.message


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:{port}", "Address already in use"), ("no-such-host.invalid:0", "")]
)
async def test_an_address_that_cannot_be_listened_at_is_one_clear_line(
    task: Task, tmp_path: Path, address: str, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = address.format(port=taken.getsockname()[1])
        sampler = ScriptedSampler(script=iter(()))
        with pytest.raises(ConfigError) as caught:
            async with open_runner(inside(task, proxy_address=place), sampler, WordRenderer(), tmp_path):
                pass
    said = str(caught.value)
    assert said.startswith(f"the proxy cannot listen at {place}: {reason}")
    assert said.endswith("; set rollouts.proxy_address")
    assert "\n" not in said


async def test_a_relay_for_an_unsandboxed_agent_is_refused(task: Task) -> None:
    async with policy("one") as proxy:
        with pytest.raises(ConfigError, match='set agent_route = "address"'):
            await run(proxy, task, SOLVE, unsandboxed=True)
        rollout = await run(proxy, task, f"{CHAT % GO}; {SOLVE}", route=Route.ADDRESS, unsandboxed=True)
    assert (rollout.outcome, len(rollout.trajectory.turns)) == (Outcome.COMPLETED, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shown_directories": {"/opt/x": "/no/such/directory"}}, "/no/such/directory a directory here"),
        ({"shown_directories": {"opt": "/tmp"}}, "opt must be absolute"),
        ({"shown_directories": {"/opt/x": "/tmp"}, "unsandboxed": True}, "needs the sandbox"),
    ],
)
async def test_a_directory_that_cannot_be_shown_is_one_clear_line(
    task: Task, options: dict[str, Any], complaint: str
) -> None:
    async with policy("one") as proxy:
        rollout = await run(proxy, task, SOLVE, route=Route.ADDRESS, **options)
    assert rollout.failure is not None
    assert complaint in rollout.failure.message


def test_relays_listen_at_ports_of_their_own_that_no_server_has_by_custom() -> None:
    ports = [relay_port(f"step-0001-00-00-0-{number:08x}") for number in range(64)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 32_768 for port in ports)  # under what the kernel gives to clients
