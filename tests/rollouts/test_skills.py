"""Skills: what the model is told of them, and that their files are there to be used; in real trials."""

from pathlib import Path

import pytest
from tests.fakes import ScriptedSampler, WordRenderer
from tests.rollouts.rig import HAND_IN, policy, request_for, write_task

from pilotage.errors import ConfigError
from pilotage.rollouts.runner import HarborRunner, RunnerSettings, check_settings
from pilotage.rollouts.trial import MINI_SWE_AGENT, AgentChoice
from pilotage.types import Rollout, Task

pytestmark = pytest.mark.agents


def write_skill(root: Path, name: str = "counting") -> Path:
    skill = root / name
    (skill / "scripts").mkdir(parents=True)
    (skill / "SKILL.md").write_text(f"---\nname: {name}\n---\nRun scripts/count.sh to count files.\n")
    (skill / "scripts" / "count.sh").write_text("echo counted_$(find . -type f | wc -l)_files\n")
    return skill


def choice(*skills: Path) -> AgentChoice:
    return AgentChoice(options={"tools": ("terminal", "localization_finish")}, skills=skills)


async def run(task: Task, agent: AgentChoice, command: str) -> tuple[Rollout, list[str]]:
    """Return the rollout, and the text that the policy read before each turn."""
    settings = RunnerSettings(trials_directory=task.path.parent.parent / "trials", agent=agent, workers=0)
    async with (
        policy(("terminal", {"command": command}), HAND_IN) as proxy,
        HarborRunner(sessions=proxy, settings=settings) as runner,
    ):
        rollout = await runner.run(request_for(task))
        sampler, renderer = proxy._policy.sampler, proxy._policy.renderer
    assert isinstance(sampler, ScriptedSampler)
    assert isinstance(renderer, WordRenderer)
    assert rollout.failure is None
    return rollout, [renderer.decode(call.prompt_ids) for call in sampler.calls]


async def test_the_model_is_told_of_a_skill_and_can_run_its_files(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks")
    agent = choice(write_skill(tmp_path))

    _, (first, second) = await run(task, agent, "bash /runtime/skills/counting/scripts/count.sh")

    assert "Skill counting" in first
    assert "/runtime/skills/counting" in first
    assert "Run scripts/count.sh to count files." in first
    assert "counted_1_files" in second  # pkg/mod.py


async def test_a_tasks_own_skills_are_told_too(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", environment_toml='skills_dir = "own"\n')
    write_skill(task.path / "environment" / "own", "looking")

    _, (first, _) = await run(task, choice(), "ls")

    assert "Skill looking" in first
    assert "own/looking" in first


def refused(agent: AgentChoice) -> str:
    with pytest.raises(ConfigError) as error:
        check_settings(RunnerSettings(trials_directory=Path(), agent=agent))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_skill_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(choice(tmp_path / "empty")).endswith("a skill is a directory with a SKILL.md")
    one, other = write_skill(tmp_path / "a"), write_skill(tmp_path / "b")
    assert refused(choice(one, other)).startswith("two skills are called counting")
    agent = AgentChoice(name=MINI_SWE_AGENT, skills=(one,))
    assert refused(agent) == f"the agent {MINI_SWE_AGENT} takes no skills; leave rollouts.skills out"
    check_settings(RunnerSettings(trials_directory=Path(), agent=choice(one)))
