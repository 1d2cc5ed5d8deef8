"""Template, proxy and tasks, each broken in one way, and the finding that names it."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from tests.fakes import WordRenderer
from tests.rollouts.rig import REWARD_IF_HANDED_IN, write_task

from pilotage.embedded import EmbeddedServer, listen
from pilotage.ops.doctor.findings import Finding, FindingName, Severity
from pilotage.ops.doctor.need import TaskNeed
from pilotage.ops.doctor.proxy import check_proxy, open_proxy
from pilotage.ops.doctor.rendering import check_model_window, check_template, check_tool_parser
from pilotage.ops.doctor.trials import check_trials_here
from pilotage.rendering import load_renderer
from pilotage.rollouts.routes import Route
from pilotage.rollouts.sandbox import check_programs
from pilotage.rollouts.trial import AgentChoice, EnvironmentChoice
from pilotage.types import ParsedReply, SessionAccess, TokenIds, ToolSchema

POLICY = Path(__file__).resolve().parents[3] / "recipes" / "demo" / "policy"


def above_ok(findings: Sequence[Finding]) -> dict[FindingName, Finding]:
    return {finding.name: finding for finding in findings if finding.fix}


# --- template ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(POLICY, tmp_path / "policy")
    return tmp_path / "policy"


def test_the_shipped_policys_template_and_tool_calls_are_well(model: Path) -> None:
    assert check_template(model).severity is Severity.OK
    assert check_tool_parser(load_renderer(model)).severity is Severity.OK
    assert check_model_window(model, 1024) is None


def test_a_template_that_no_renderer_writes_is_an_error(model: Path) -> None:
    template = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    found = check_template(model)
    assert (found.name, found.severity) == (FindingName.TEMPLATE, Severity.ERROR)
    assert "no supported family" in found.evidence
    assert "official template" in found.fix


def test_a_directory_without_a_tokenizer_is_an_error_of_the_template(tmp_path: Path) -> None:
    found = check_template(tmp_path)
    assert (found.name, found.severity) == (FindingName.TEMPLATE, Severity.ERROR)
    assert str(tmp_path) in found.evidence


def test_a_window_that_the_model_was_not_made_for_is_an_error(model: Path) -> None:
    found = check_model_window(model, 4096)
    assert found is not None
    assert (found.name, found.severity) == (FindingName.CONTEXT_WINDOW, Severity.ERROR)
    assert "was made for 2048" in found.evidence
    assert "policy.max_context_tokens=2048" in found.fix


class ForgetsArguments(WordRenderer):
    """Reads every call as one without arguments."""

    def parse(self, completion_ids: TokenIds, tools: Sequence[ToolSchema]) -> ParsedReply:
        reply = WordRenderer.parse(self, completion_ids, tools)
        calls = tuple(
            type(call)(id=call.id, name=call.name, arguments="{}") for call in reply.message.tool_calls
        )
        message = type(reply.message)(role=reply.message.role, tool_calls=calls)
        return ParsedReply(message=message, malformed_calls=reply.malformed_calls)


class SeesNoCalls(WordRenderer):
    """Takes every call for text."""

    def parse(self, completion_ids: TokenIds, tools: Sequence[ToolSchema]) -> ParsedReply:
        reply = WordRenderer.parse(self, completion_ids, tools)
        return ParsedReply(message=type(reply.message)(role=reply.message.role))


@pytest.mark.parametrize("renderer", [ForgetsArguments(), SeesNoCalls()])
def test_a_call_that_does_not_come_back_is_an_error(renderer: WordRenderer) -> None:
    found = check_tool_parser(renderer)
    assert (found.name, found.severity) == (FindingName.TOOL_PARSER, Severity.ERROR)
    assert "came back as" in found.evidence
    assert "runs another command" in found.fix
    assert check_tool_parser(WordRenderer()).severity is Severity.OK


# --- proxy ---


@contextlib.asynccontextmanager
async def answering(status: int) -> AsyncGenerator[SessionAccess]:
    """A server on a socket that answers everything with one status."""

    async def answer(request: Request) -> Response:
        return Response(status_code=status)

    listener = listen("127.0.0.1", 0, backlog=8)
    app = Starlette(routes=[HttpRoute("/{path:path}", answer)])
    server = EmbeddedServer(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        yield SessionAccess(base_url=url, api_key="k", model="m")
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def test_our_proxy_answers_its_key_and_nobody_else() -> None:
    async with open_proxy(WordRenderer(), max_context_tokens=64) as access:
        found = await check_proxy(access)
    assert found.severity is Severity.OK
    assert "health 200, with a key 200, without one 401" in found.evidence


@pytest.mark.parametrize("status", [200, 401, 404])
async def test_a_server_that_is_not_the_proxy_is_an_error(status: int) -> None:
    async with answering(status) as access:
        found = await check_proxy(access)
    assert (found.name, found.severity) == (FindingName.PROXY, Severity.ERROR)
    assert "200, 200 and 401 were expected" in found.evidence
    assert "what else answers on this address" in found.fix


async def test_a_proxy_that_is_not_there_is_an_error() -> None:
    found = await check_proxy(SessionAccess(base_url="http://127.0.0.1:9/v1", api_key="k", model="m"))
    assert (found.name, found.severity) == (FindingName.PROXY, Severity.ERROR)
    assert "does not answer" in found.evidence
    assert "firewall" in found.fix


# --- tasks ---


needs_sandbox = pytest.mark.agents
FREE_REWARD = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
NO_REWARD = "#!/bin/bash\nexit 0\n"
NEVER = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n"


def without_verifier(task: Path) -> None:
    (task / "tests" / "test.sh").unlink()


def with_blank_instruction(task: Path) -> None:
    (task / "instruction.md").write_text(" ")


def need_of(*train: Path, held_out: tuple[Path, ...] = ()) -> TaskNeed:
    check_programs()
    return TaskNeed(train=train, held_out=held_out)


@needs_sandbox
@pytest.mark.parametrize(
    ("test_sh", "expected"),
    [
        (REWARD_IF_HANDED_IN, {}),
        (FREE_REWARD, {FindingName.NO_OP: "doing nothing earns 1, as much as the oracle"}),
        (
            NO_REWARD,
            {
                FindingName.ORACLE: "the oracle has no reward",
                FindingName.NO_OP: "doing nothing has no reward",
            },
        ),
        (
            NEVER,
            {
                FindingName.ORACLE: "the oracle earns 0, and more than 0 can be had",
                FindingName.NO_OP: "as much as the oracle",
            },
        ),
    ],
    ids=["good", "free reward", "no reward", "never"],
)
async def test_a_task_is_judged_by_its_oracle_and_by_doing_nothing(
    test_sh: str, expected: dict[FindingName, str], tmp_path: Path
) -> None:
    task = write_task(tmp_path, test_sh=test_sh)
    findings = await check_trials_here(need_of(task.path), None)
    found = above_ok(findings)
    assert found.keys() == expected.keys()
    for name, evidence in expected.items():
        assert evidence in found[name].evidence
        assert f"pilotage data check {task.path}" in found[name].fix
    assert findings[0].name is FindingName.TASKS


@pytest.mark.parametrize(
    ("spoil", "evidence", "fix"),
    [
        (shutil.rmtree, "no such directory", "give a Harbor task"),
        (without_verifier, "no tests/test.sh", "a Harbor task needs"),
        (with_blank_instruction, "instruction.md is blank", "tasks.train"),
    ],
    ids=["missing", "no verifier", "blank"],
)
async def test_a_task_that_cannot_be_run_is_an_error(
    spoil: Callable[[Path], object], evidence: str, fix: str, tmp_path: Path
) -> None:
    task = write_task(tmp_path)
    spoil(task.path)
    (found,) = await check_trials_here(need_of(task.path), None)
    assert (found.name, found.severity) == (FindingName.TASKS, Severity.ERROR)
    assert evidence in found.evidence
    assert fix in found.fix or fix in found.evidence


async def test_held_out_tasks_that_are_trained_on_are_an_error(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (found,) = await check_trials_here(need_of(task.path, held_out=(task.path,)), None)
    assert (found.name, found.severity) == (FindingName.TASKS, Severity.ERROR)
    assert "remove them from one side" in found.fix


async def test_an_environment_that_harbor_does_not_know_is_an_error_of_the_sandbox(tmp_path: Path) -> None:
    need = TaskNeed(
        train=(write_task(tmp_path).path,), held_out=(), environment=EnvironmentChoice(name="moon")
    )
    found = above_ok(await check_trials_here(need, None))
    assert found.keys() == {FindingName.SANDBOX}
    assert "no environment 'moon'" in found[FindingName.SANDBOX].evidence
    assert "rollouts.environment" in found[FindingName.SANDBOX].fix


async def test_an_agent_inside_without_a_route_is_an_error_of_the_proxy(tmp_path: Path) -> None:
    need = TaskNeed(train=(write_task(tmp_path).path,), held_out=(), agent=AgentChoice(name="codex"))
    found = above_ok(await check_trials_here(need, None))
    assert found.keys() == {FindingName.PROXY}
    assert 'agent_route = "relay"' in found[FindingName.PROXY].fix


@needs_sandbox
async def test_the_proxy_is_asked_from_inside_the_sandbox_by_the_agents_route(tmp_path: Path) -> None:
    need = TaskNeed(
        train=(write_task(tmp_path).path,),
        held_out=(),
        agent=AgentChoice(name="codex", route=Route.RELAY),
    )
    async with open_proxy(WordRenderer(), max_context_tokens=64) as access:
        findings = await check_trials_here(need, access)
    assert above_ok(findings) == {}
    assert (
        "answers inside the environment, by relay"
        in {f.name: f.evidence for f in findings}[FindingName.PROXY]
    )
    nobody = SessionAccess(base_url="http://127.0.0.1:9/v1", api_key="k", model="m")
    found = above_ok(await check_trials_here(need, nobody))
    assert "by relay: RouteError" in found[FindingName.PROXY].evidence
    assert "python3" in found[FindingName.PROXY].fix
