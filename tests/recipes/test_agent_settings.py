"""From a recipe's [rollouts] to the runner's settings: skills, MCP servers, and the limits of trials."""

from pathlib import Path

import pytest

from pilotage.errors import ConfigError
from pilotage.recipes import load_recipe
from pilotage.recipes.stack import runner_settings
from pilotage.rollouts import RunnerSettings, TrialLimits


def settings_of(tmp_path: Path, rollouts: str) -> RunnerSettings:
    path = tmp_path / "recipe.toml"
    path.write_text(f'name = "small"\npolicy.model = "model"\n[rollouts]\n{rollouts}\n')
    return runner_settings(load_recipe(path).rollouts, tmp_path / "trials")


@pytest.fixture
def skills(tmp_path: Path) -> str:
    (tmp_path / "profiling").mkdir()
    (tmp_path / "notes.md").write_text("Mind the gap.\n")
    return 'skills = ["notes.md", "profiling"]'


def test_openhands_gets_text_files_as_an_option_and_directories_as_skills(
    tmp_path: Path, skills: str
) -> None:
    agent = settings_of(tmp_path, skills).agent
    assert agent.options["skills"] == [str(tmp_path / "notes.md")]
    assert agent.skills == (tmp_path / "profiling",)


@pytest.mark.parametrize("setting", ['skills = ["gone"]', 'system_prompt_file = "gone"'])
def test_a_file_that_does_not_exist_is_refused_by_its_key_before_a_rollout_could_miss_it(
    tmp_path: Path, setting: str
) -> None:
    key = setting.split(" ")[0]
    with pytest.raises(ConfigError, match=rf"rollouts\.{key}: .*gone does not exist"):
        settings_of(tmp_path, setting)


def test_another_agent_gets_directories_alone(tmp_path: Path, skills: str) -> None:
    agent = settings_of(tmp_path, 'agent = "codex"\nskills = ["profiling"]').agent
    assert (agent.skills, dict(agent.options)) == ((tmp_path / "profiling",), {})
    with pytest.raises(ConfigError, match=r"notes\.md is no directory; only the agent openhands"):
        settings_of(tmp_path, f'agent = "codex"\n{skills}')


def test_mcp_servers_reach_openhands_and_no_other_agent(tmp_path: Path) -> None:
    servers = 'mcp_servers.notes = { command = "notes", args = ["-q"] }'
    options = settings_of(tmp_path, servers).agent.options
    assert options["driver_mcp_servers"] == {"notes": {"command": "notes", "args": ("-q",), "url": None}}
    with pytest.raises(ConfigError, match="mcp_servers are for the agent openhands"):
        settings_of(tmp_path, f'agent = "codex"\n{servers}')


def test_a_server_that_is_both_program_and_address_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollouts\.mcp_servers\.notes: an MCP server has a command"):
        settings_of(tmp_path, 'mcp_servers.notes = { command = "notes", url = "http://b" }')


def test_limits_of_trials_are_absent_unless_they_are_given(tmp_path: Path) -> None:
    assert settings_of(tmp_path, "").limits == TrialLimits()
    given = "setup_slots = 1\nagent_slots = 2\nverifier_slots = 3\nstarts_per_s = 0.5"
    expected = TrialLimits(setup_slots=1, agent_slots=2, verifier_slots=3, starts_per_s=0.5)
    assert settings_of(tmp_path, given).limits == expected
