"""How an agent reaches the proxy, and whether it can: decided and checked before the first rollout."""

import zlib
from enum import StrEnum

from pilotage.errors import ConfigError
from pilotage.rollouts.third_party import prepare

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Below the ports that systems hand out themselves."""


class Route(StrEnum):
    """The way of a model call from an agent to the proxy."""

    DRIVER = "driver"
    """The agent runs in this process and calls the proxy from here; only its tools enter the environment."""
    ADDRESS = "address"
    """The agent runs in the environment, which shares this machine's network: the proxy's own address."""
    RELAY = "relay"
    """The agent runs in the environment; calls come out through the environment's exec and file transfer."""


def relay_port(trial_name: str) -> int:
    """Return where a trial's agent finds the proxy inside: trials may share a network, but not a port."""
    return _FIRST_PORT + zlib.crc32(trial_name.encode()) % _NUM_PORTS


def check_route(agent: str, route: Route) -> None:
    """Raise unless `agent` can reach the proxy by `route`.

    Args:
        agent: `module:Class`, or one of Harbor's names.

    Raises:
        ConfigError: there is no such agent, or it runs elsewhere than the route says.
    """
    runs_inside = _runs_inside(agent)
    if runs_inside and route is Route.DRIVER:
        raise ConfigError(
            f"the agent {agent} runs inside the environment and needs a declared route to the proxy: set"
            ' agent_route = "relay", which works wherever there is python3, or "address" where the'
            " environment shares this machine's network"
        )
    if not runs_inside and route is not Route.DRIVER:
        raise ConfigError(f'the agent {agent} calls the model from this process: set agent_route = "driver"')


def _runs_inside(agent: str) -> bool:
    prepare()
    from harbor.agents.factory import AgentFactory
    from harbor.agents.installed.base import BaseInstalledAgent
    from harbor.models.trial.config import AgentConfig

    try:
        found = AgentFactory.get_agent_class_from_config(AgentConfig(name=agent))
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"no agent {agent}: {error}") from error
    return issubclass(found, BaseInstalledAgent)
