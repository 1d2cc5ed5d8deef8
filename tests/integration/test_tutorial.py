"""What the tutorial tells the reader to write works as it is written."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.rollouts.rig import policy, request_for

from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.trial import AgentChoice
from pilotage.types import Outcome, Task

pytestmark = pytest.mark.agents
TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def block_with(text: str) -> str:
    blocks = re.findall(r"^```\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return found


def write_tutorial(root: Path) -> None:
    subprocess.run(["bash", "-ec", block_with("cat > task.toml")], cwd=root, check=True)
    (root / "my_agent.py").write_text(block_with("class OneCommand"))


@pytest.mark.parametrize(("command", "reward"), [("echo hello > greeting.txt", 1.0), ("true", 0.0)])
async def test_the_tutorials_agent_solves_the_tutorials_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, reward: float
) -> None:
    write_tutorial(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = RunnerSettings(
        trials_directory=tmp_path / "trials", agent=AgentChoice(name="my_agent:OneCommand"), workers=0
    )
    task = Task(id="mine/hello", path=tmp_path / "tasks" / "mine" / "hello")

    async with (
        policy(command) as proxy,
        HarborRunner(sessions=proxy, settings=settings) as runner,
    ):
        rollout = await runner.run(request_for(task))

    assert rollout.failure is None
    assert rollout.outcome == Outcome.COMPLETED
    assert rollout.reward is not None
    assert rollout.reward.value == reward
    assert len(rollout.trajectory.turns) == 1
