"""Whole rollouts: real Harbor trials, the real OpenHands SDK, a real proxy, a scripted policy."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.rollouts.rig import HAND_IN, Turn, policy, request_for, run_one, write_task

from pilotage.loops.rollout_files import read_rollout, write_rollout
from pilotage.proxy import ChatCompletionsProxy
from pilotage.rollouts.local_workers import LocalProcess
from pilotage.rollouts.register import Register
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice, TrialSpec, run_trial
from pilotage.types import Outcome, Rollout, SessionAccess, SessionRecord, SessionSpec, Task

pytestmark = pytest.mark.agents

TOOLS = ("terminal", "code_search", "localization_finish")


def openhands(**options: object) -> AgentChoice:
    return AgentChoice(options={"tools": TOOLS, **options})


def settings_for(tmp_path: Path, **fields: object) -> RunnerSettings:
    chosen: dict[str, object] = {"trials_directory": tmp_path / "trials", "workers": 0, "agent": openhands()}
    return RunnerSettings(**(chosen | fields))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "tasks")


async def run(task: Task, *turns: Turn, **fields: object) -> Rollout:
    settings = settings_for(task.path.parent.parent, **fields)
    return await run_one(task, *turns, settings=settings)


class Watched:
    """Sessions at a proxy; keeps their keys and counts how many are open."""

    def __init__(self, proxy: ChatCompletionsProxy) -> None:
        self.keys: list[str] = []
        self.num_open = self.most_open = 0
        self._proxy = proxy

    def open(self, spec: SessionSpec) -> SessionAccess:
        access = self._proxy.open(spec)
        self.keys.append(access.api_key)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return access

    def prolong(self, access: SessionAccess, seconds: float) -> None:
        self._proxy.prolong(access, seconds)

    async def close(self, access: SessionAccess) -> SessionRecord:
        self.num_open -= 1
        return await self._proxy.close(access)


def observations(directory: Path) -> str:
    """Return what a command of the agent wrote to /logs/agent/seen, kept in the trial directory."""
    [seen] = directory.glob("*/agent/seen")
    return seen.read_text()


async def test_a_hand_in_that_the_verifier_likes_completes_with_its_reward(
    task: Task, tmp_path: Path
) -> None:
    rollout = await run(task, ("code_search", {"query": "gamma"}), HAND_IN, expects_hand_in=True)

    assert rollout.failure is None
    assert (rollout.outcome, rollout.attempt) == (Outcome.COMPLETED, 0)
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.source) == (1.0, "verifier/reward.txt")
    assert json.loads(rollout.facts["hand_in"]) == {
        "locations": [{"file": "pkg/mod.py", "function_name": "gamma"}]
    }
    assert len(rollout.trajectory.turns) == 2
    assert all(seconds > 0 for seconds in rollout.timings_s.values())
    assert list((tmp_path / "trials").iterdir()) == []  # the trial directory is gone


@pytest.mark.parametrize(("floor", "reward"), [(None, 1.0), (0.0, 0.0)])
async def test_a_hand_in_beside_another_call_does_not_pass_the_gate(
    task: Task, floor: float | None, reward: float
) -> None:
    turn: Turn = [("code_search", {"query": "gamma"}), HAND_IN]
    rollout = await run(task, turn, expects_hand_in=True, submission_floor=floor)

    assert rollout.outcome == Outcome.SUBMISSION_INVALID
    assert rollout.facts["submission_fault"] == "handed in beside 1 other calls"
    assert rollout.reward is not None
    assert rollout.reward.value == reward


async def test_the_agent_sees_the_task_alone(task: Task, tmp_path: Path) -> None:
    look = (
        "env; ls -AR /tests /solution; cat /proc/1/environ; grep -r GOLD / --include=gold.json 2>/dev/null;"
        " find . -type f"
    )
    command: Turn = ("terminal", {"command": f"({look}) > /logs/agent/seen 2>&1"})

    await run(task, command, HAND_IN, keep_trials=True)

    seen = observations(tmp_path / "trials")
    assert "GOLD" not in seen
    assert "KEY" not in seen  # neither the session's key nor any other
    assert "./pkg/mod.py" in seen
    assert "test.sh" not in seen


async def test_the_key_is_nowhere_in_what_a_trial_leaves(task: Task, tmp_path: Path) -> None:
    async with policy(HAND_IN) as proxy:
        sessions = Watched(proxy)
        settings = settings_for(tmp_path, keep_trials=True)
        async with HarborRunner(sessions=sessions, settings=settings) as runner:
            await runner.run(request_for(task))

    [key] = sessions.keys
    files = [path for path in (tmp_path / "trials").rglob("*") if path.is_file()]
    assert files
    assert all(key.encode() not in path.read_bytes() for path in files)


async def test_the_working_directory_persists_and_exit_codes_show(task: Task, tmp_path: Path) -> None:
    renderer_saw: list[str] = []
    async with policy(
        ("terminal", {"command": "cd pkg"}),
        ("terminal", {"command": "pwd; exit 3"}),
        ("terminal", {"command": "pwd"}),
        ("terminal", {"command": "sleep 30"}),
        ("terminal", {"command": "head -c 3000 /dev/zero | tr '\\0' x"}),
        HAND_IN,
    ) as proxy:
        agent = openhands(command_timeout_s=1.0, max_output_chars=200)
        async with HarborRunner(sessions=proxy, settings=settings_for(tmp_path, agent=agent)) as runner:
            rollout = await runner.run(request_for(task))
        renderer = proxy._policy.renderer  # the test's own word renderer
        for turn in rollout.trajectory.turns[1:]:
            renderer_saw.append(renderer.decode(i for i in turn.context_ids.tolist() if i > 8))  # pyright: ignore

    assert rollout.outcome == Outcome.COMPLETED
    assert renderer_saw[0] == ""
    assert renderer_saw[1] == "/workspace/pkg\n[exit code 3]"
    assert renderer_saw[2] == "/workspace/pkg"
    assert renderer_saw[3] == "[timed out after 1 s]"
    assert renderer_saw[4] == "x" * 100 + "\n[... 2800 characters omitted ...]\n" + "x" * 100


@pytest.mark.parametrize(
    "arguments",
    [
        '{"cmd": "ls',  # P1
        "{'command': 'ls',}",  # P5
        '{"command": 5}',  # P15
        '{"nonsense": "ls"}',
    ],
)
async def test_a_malformed_call_is_answered_and_the_rollout_lives(task: Task, arguments: str) -> None:
    rollout = await run(task, ("terminal", arguments), HAND_IN)

    assert rollout.outcome == Outcome.COMPLETED
    assert len(rollout.trajectory.turns) == 2


@pytest.mark.parametrize("name", ["no_such_tool", "str_replace</function"])  # P2, P7
async def test_a_call_of_an_unknown_tool_is_answered_and_the_rollout_lives(task: Task, name: str) -> None:
    rollout = await run(task, (name, {"command": "ls"}), HAND_IN)

    assert rollout.outcome == Outcome.COMPLETED


@pytest.mark.parametrize(
    "bad",
    [
        {"locations": []},
        {"locations": [{"file": ""}]},
        {"locations": [{"file": "/etc/passwd"}]},
        {"locations": [{"path": "pkg/mod.py"}]},
        {"locations": "pkg/mod.py"},
        {},
    ],
)
async def test_a_bad_hand_in_is_refused_with_a_reason_and_may_be_repaired(task: Task, bad: object) -> None:
    rollout = await run(task, ("localization_finish", json.dumps(bad)), HAND_IN, expects_hand_in=True)

    assert rollout.outcome == Outcome.COMPLETED
    assert len(rollout.trajectory.turns) == 2


async def test_no_hand_in_is_an_invalid_submission_with_the_verifiers_reward(task: Task) -> None:
    rollout = await run(task, "I am done.", expects_hand_in=True)

    assert rollout.outcome == Outcome.SUBMISSION_INVALID
    assert rollout.reward is not None
    assert rollout.reward.value == 0.0
    assert rollout.facts["last_message"] == "I am done."


async def test_a_spent_turn_budget_is_scored(task: Task) -> None:
    look = [("terminal", {"command": f"echo {n}"}) for n in range(5)]
    rollout = await run(task, *look, max_turns=3)

    assert rollout.outcome == Outcome.TURNS_EXHAUSTED
    assert rollout.reward is not None
    assert len(rollout.trajectory.turns) == 3


async def test_a_loop_is_stuck_and_scored(task: Task) -> None:
    rollout = await run(task, *[("terminal", {"command": "ls"})] * 8)

    assert rollout.outcome == Outcome.STUCK
    assert rollout.reward is not None


async def test_a_full_context_window_is_scored(task: Task, tmp_path: Path) -> None:
    rollout = await run_one(
        task,
        ("terminal", {"command": "seq 1 3000"}),
        HAND_IN,
        settings=settings_for(tmp_path),
        max_context_tokens=2000,
    )

    assert rollout.outcome == Outcome.CONTEXT_EXCEEDED
    assert rollout.reward is not None


async def test_a_broken_sampler_is_tried_again_in_a_new_session(task: Task) -> None:
    rollout = await run(task, RuntimeError("out of memory"), HAND_IN)

    assert (rollout.outcome, rollout.attempt, rollout.reward) == (Outcome.SAMPLER_ERROR, 1, None)
    assert rollout.failure is not None
    assert rollout.failure.where == "sampler"


async def test_an_agent_that_takes_too_long_times_out_and_is_not_tried_again(task: Task) -> None:
    rollout = await run(
        task, ("terminal", {"command": "sleep 50"}), HAND_IN, deadlines=Deadlines(agent_s=2.0)
    )

    assert (rollout.outcome, rollout.attempt, rollout.reward) == (Outcome.AGENT_TIMEOUT, 0, None)
    assert rollout.timings_s["total"] < 20


@pytest.mark.parametrize(
    ("test_sh", "outcome", "message"),
    [
        ("true", Outcome.REWARD_MISSING, "wrote neither"),
        ("echo nan > /logs/verifier/reward.txt", Outcome.REWARD_MISSING, "not one plain number"),
        ("echo '{}' > /logs/verifier/reward.json", Outcome.REWARD_MISSING, "empty object"),
        ("echo '{\"reward\": {}}' > /logs/verifier/reward.json", Outcome.REWARD_MISSING, "not a number"),
        ("truncate -s 1900M /logs/verifier/reward.json", Outcome.REWARD_MISSING, "too large"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", Outcome.REWARD_MISSING, "wrote neither"),
    ],
)
async def test_an_unreadable_reward_is_none_and_tried_once_more(
    tmp_path: Path, test_sh: str, outcome: Outcome, message: str
) -> None:
    task = write_task(tmp_path / "tasks", test_sh=f"#!/bin/bash\n{test_sh}\n")
    rollout = await run(task, HAND_IN)

    assert (rollout.outcome, rollout.attempt, rollout.reward) == (outcome, 1, None)
    assert rollout.failure is not None
    assert message in rollout.failure.message


async def test_the_exit_code_of_the_verifier_says_nothing(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", test_sh="echo 1 > /logs/verifier/reward.txt; exit 1\n")  # R19

    assert (await run(task, HAND_IN)).outcome == Outcome.COMPLETED


async def test_a_verifier_that_hangs_leaves_nothing_running(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", test_sh="#!/bin/bash\nsleep 600 & sleep 600\n")  # H7
    rollout = await run(task, HAND_IN, deadlines=Deadlines(verifier_s=1.0))

    assert rollout.outcome == Outcome.VERIFIER_ERROR
    assert [holding for holding in Register().holdings() if str(tmp_path) in holding.tree] == []


async def test_a_verifiers_fault_is_its_own_though_the_clock_is_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harbor.trial.trial import Trial

    # What fails while it runs is stamped by the clock as it is then, an hour before the verifier began.
    monkeypatch.setattr(Trial, "_now", staticmethod(lambda: datetime.now(UTC) + timedelta(hours=1)))
    task = write_task(tmp_path / "tasks", test_sh="#!/bin/bash\nsleep 600\n")
    rollout = await run(task, HAND_IN, deadlines=Deadlines(verifier_s=1.0))
    assert rollout.outcome == Outcome.VERIFIER_ERROR


async def test_a_command_cannot_kill_anything_outside(task: Task) -> None:
    bystander = subprocess.Popen(["sleep", "3600"])  # noqa: ASYNC220
    rollout = await run(task, ("terminal", {"command": "pkill -9 sleep; kill -9 -1"}), HAND_IN)  # H16

    assert rollout.outcome == Outcome.COMPLETED
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


async def test_a_missing_task_is_an_error_of_its_own_rollout_alone(task: Task, tmp_path: Path) -> None:
    broken = Task(id="toy/none", path=tmp_path / "none")
    async with (
        policy(HAND_IN) as proxy,
        HarborRunner(sessions=proxy, settings=settings_for(tmp_path)) as runner,
    ):
        rollouts = await asyncio.gather(
            runner.run(request_for(broken, "a")), runner.run(request_for(task, "b"))
        )

    assert [rollout.outcome for rollout in rollouts] == [Outcome.ENVIRONMENT_ERROR, Outcome.COMPLETED]  # H3


async def test_cancelling_stops_everything_and_raises(task: Task, tmp_path: Path) -> None:
    async with (
        policy(("terminal", {"command": "sleep 600"}), HAND_IN) as proxy,
        HarborRunner(sessions=proxy, settings=settings_for(tmp_path)) as runner,
    ):
        running = asyncio.create_task(runner.run(request_for(task)))
        await asyncio.sleep(3)
        running.cancel()  # H2
        with pytest.raises(asyncio.CancelledError):
            await running

    assert list((tmp_path / "trials").iterdir()) == []
    assert [holding for holding in Register().holdings() if str(tmp_path) in holding.tree] == []


async def test_cancelling_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    slow = write_task(tmp_path / "tasks", test_sh="#!/bin/bash\nsleep 600\n")
    spec = TrialSpec(
        name=f"toy-{tmp_path.name}",
        task_path=slow.path,
        trials_directory=tmp_path / "trials",
        access=SessionAccess(base_url="http://127.0.0.1:9/v1", api_key="none", model="openai/none"),
        agent=AgentChoice(name="nop"),
        environment=EnvironmentChoice(),
        deadlines=Deadlines(),
        max_turns=1,
        reward_key="reward",
    )
    running = asyncio.create_task(run_trial(spec))
    await asyncio.sleep(3)
    # A worker that is closed while it cancels a trial cancels it once more.
    while not running.done():
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(10):
        while [holding for holding in Register().holdings() if str(tmp_path) in holding.tree]:  # noqa: ASYNC110  # another thread lets go
            await asyncio.sleep(0.05)
    assert list((tmp_path / "trials").iterdir()) == []


async def test_no_more_rollouts_run_at_once_than_allowed(task: Task, tmp_path: Path) -> None:
    async with policy(HAND_IN) as proxy:
        sessions = Watched(proxy)
        settings = settings_for(tmp_path, concurrency=2)
        async with HarborRunner(sessions=sessions, settings=settings) as runner:
            await asyncio.gather(*(runner.run(request_for(task, str(n))) for n in range(6)))

    assert (sessions.most_open, sessions.num_open) == (2, 0)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
@pytest.mark.parametrize("unsandboxed", [False, True])
async def test_harbors_own_agents_run_by_name(
    task: Task, agent: str, reward: float, unsandboxed: bool
) -> None:
    rollout = await run(
        task,
        agent=AgentChoice(name=agent),
        environment=EnvironmentChoice(options={"unsandboxed": unsandboxed}),
    )

    assert rollout.failure is None
    assert rollout.outcome == Outcome.COMPLETED
    assert rollout.reward is not None
    assert rollout.reward.value == reward


async def test_an_unknown_agent_or_option_is_one_clear_line(task: Task) -> None:
    unknown = await run(task, agent=AgentChoice(options={"max_tokns": 5}))
    tool = await run(task, HAND_IN, agent=openhands(tools=("terminal", "bash")))

    assert unknown.failure is not None
    assert "Unknown option 'max_tokns'" in unknown.failure.message
    assert tool.failure is not None
    assert "choose each once from terminal, code_search, localization_finish, finish" in tool.failure.message


def test_a_machine_without_bubblewrap_is_told_what_to_do() -> None:
    program = """
from pilotage.errors import ConfigError
from pilotage.rollouts.sandbox import check_programs
try:
    check_programs()
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("the sandbox needs bwrap, nsenter, setpriv, bash: install bubblewrap")
    assert "unsandboxed = true" in done.stdout
    assert done.stdout.count("\n") == 1


def test_importing_the_package_brings_in_neither_harbor_nor_the_sdk() -> None:
    heavy = ("harbor", "openhands", "litellm")
    program = f"import sys, pilotage.rollouts; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


# --- worker processes ---


@contextlib.asynccontextmanager
async def pool(tmp_path: Path, *turns: Turn) -> AsyncGenerator[HarborRunner]:
    settings = settings_for(tmp_path, workers=1)
    async with policy(*turns) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        yield runner


@pytest.mark.slow
async def test_a_worker_process_runs_many_trials_and_ends_with_the_runner(task: Task, tmp_path: Path) -> None:
    async with pool(tmp_path, ("terminal", {"command": "ls"}), HAND_IN) as runner:
        rollouts = await asyncio.gather(*(runner.run(request_for(task, str(n))) for n in range(4)))
        assert runner._workers is not None
        [worker] = await runner._workers._pool.workers()

    assert {rollout.outcome for rollout in rollouts} == {Outcome.COMPLETED}
    assert isinstance(worker.process, LocalProcess)
    assert worker.process.child.returncode == 0


@pytest.mark.slow
async def test_a_worker_that_dies_costs_its_trials_one_attempt(task: Task, tmp_path: Path) -> None:
    async with pool(tmp_path, ("terminal", {"command": "sleep 5"}), HAND_IN) as runner:
        running = asyncio.create_task(runner.run(request_for(task)))
        assert runner._workers is not None
        [worker] = await runner._workers._pool.workers()
        await worker.ready
        await asyncio.sleep(2)
        worker.process.kill()
        rollout = await running

    assert (rollout.outcome, rollout.attempt) == (Outcome.COMPLETED, 1)
    assert [holding for holding in Register().holdings() if str(tmp_path) in holding.tree] == []


async def test_a_rollout_that_was_tried_again_is_written_with_what_its_first_try_cost(
    task: Task, tmp_path: Path
) -> None:
    rollout = await run(task, HAND_IN, agent=openhands(system_prompt_file=str(tmp_path / "gone")))
    assert (rollout.outcome, rollout.attempt) == (Outcome.ENVIRONMENT_ERROR, 1)
    write_rollout(tmp_path / "rollout.json.gz", rollout)
    found = read_rollout(tmp_path / "rollout.json.gz")
    assert found.discarded_tokens == {"environment_error": 0}
    assert found.failure == rollout.failure
