"""How an agent reaches the proxy, and whether it can: decided and checked before the first rollout."""

import zlib
from enum import StrEnum
from urllib.parse import urlsplit

from pilotage.errors import ConfigError
from pilotage.rollouts.third_party import prepare
from pilotage.types import ProxyAddress

_MOST_PORT = 65_535
_WILDCARDS = ("0.0.0.0", "::")
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""Below the ports that systems hand out themselves."""


class Route(StrEnum):
    """The way of a model call from an agent to the proxy."""

    DRIVER = "driver"
    """The agent runs in this process and calls the proxy from here; only its tools enter the environment."""
    ADDRESS = "address"
    """The agent runs in the environment, and calls the proxy's address, or a URL that leads to it."""
    RELAY = "relay"
    """The agent runs in the environment; calls come out through the environment's exec and file transfer."""


def relay_port(trial_name: str) -> int:
    """Return where a trial's agent finds the proxy inside: trials may share a network, but not a port."""
    return _FIRST_PORT + zlib.crc32(trial_name.encode()) % _NUM_PORTS


def proxy_address(listens_at: str, url: str | None) -> ProxyAddress:
    """Read where the proxy is to listen, and where agents are to find it.

    Args:
        listens_at: `HOST:PORT`.
        url: of the proxy as agents see it, with or without /v1 at its end.

    Raises:
        ValueError: either is not what it should be, or nobody could say where the proxy is.
    """
    host, _, port = listens_at.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not port.isascii() or int(port) > _MOST_PORT:
        raise ValueError(f'proxy_address = "{listens_at}" is no HOST:PORT; port 0 is any that is free')
    if url is None:
        if host in _WILDCARDS:
            raise ValueError(
                f'proxy_address = "{listens_at}" is every address of this machine, and agents must be given'
                " one: name it here, or set proxy_url"
            )
        return ProxyAddress(host=host, port=int(port))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f'proxy_url = "{url}" is no http or https URL of a host and a path')
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "proxy_url has a user or a password; each rollout has a key of its own, so leave them out"
        )
    return ProxyAddress(host=host, port=int(port), url=f"{url.rstrip('/').removesuffix('/v1')}/v1")


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
            " environment shares this machine's network or proxy_address or proxy_url leads to the proxy"
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
