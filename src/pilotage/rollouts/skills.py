"""Skills: directories with a SKILL.md, which Harbor puts into the environment for agents that take them."""

import shlex
from collections import Counter
from typing import TYPE_CHECKING

from pilotage.errors import ConfigError
from pilotage.rollouts.report import EnvironmentLostError
from pilotage.rollouts.third_party import prepare
from pilotage.rollouts.trial import AgentChoice

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

TEXT = "SKILL.md"


def check_skills(agent: AgentChoice) -> None:
    """Raise unless the agent takes skills and each of its is one.

    Raises:
        ConfigError: a directory has no SKILL.md, two have one name, or the agent takes none.
    """
    if not agent.skills:
        return
    for skill in agent.skills:
        if not (skill / TEXT).is_file():
            raise ConfigError(f"skill {skill}: no {TEXT} in it; a skill is a directory with a {TEXT}")
    name, count = Counter(skill.resolve().name for skill in agent.skills).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"two skills are called {name}, and would lie in one place; rename a directory")
    prepare()
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    found = AgentFactory.get_agent_class_from_config(AgentConfig(name=agent.name))
    if not found.capabilities.skills:
        raise ConfigError(f"the agent {agent.name} takes no skills; leave rollouts.skills out")


async def read_skills(environment: "BaseEnvironment", directory: str) -> list[str]:
    """Return what the model is told of each skill in a directory of the environment: its text and its place.

    Raises:
        EnvironmentLostError: a skill cannot be read.
    """
    listed = await _output(environment, f"find {shlex.quote(directory)} -mindepth 2 -maxdepth 2 -name {TEXT}")
    return [
        f"# Skill {file.split('/')[-2]}\n\nIts files are in {file.removesuffix(f'/{TEXT}')}\n\n"
        + await _output(environment, f"cat {shlex.quote(file)}")
        for file in sorted(listed.splitlines())
    ]


async def _output(environment: "BaseEnvironment", command: str) -> str:
    done = await environment.exec(command)
    if done.return_code:
        raise EnvironmentLostError(f"`{command}` failed: {done.stderr or done.return_code}")
    return done.stdout or ""
