"""What the agents that run in this process have in common: options, endpoint and key.

The model is called from here and tools act through the environment, so such an agent works in any Harbor
environment, one without a route to the model included, and the key never enters it.
"""

import inspect
import os
from pathlib import Path
from typing import Any, cast, override

from harbor.agents.agent_auth_resolution import ResolvedModelConnection
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from pydantic import Field

from pilotage.errors import ConfigError

_HARBOR_ARGUMENTS = set(inspect.signature(BaseAgent.__init__).parameters) - {"base_url"}


class DriverAgentOptions(AgentOptions):
    """What `--agent-kwarg NAME=VALUE` and a recipe's agent options may set; an unknown name is refused."""

    base_url: str | None = Field(default=None, description="OpenAI-compatible endpoint, ending in /v1.")
    api_key: str = Field(default="", description="Key of the endpoint.")
    api_key_variable: str = Field(default="", description="Environment variable that holds the key instead.")
    max_turns: int = Field(default=30, ge=1, description="Model calls before the conversation ends.")
    command_timeout_s: float = Field(default=60.0, gt=0, description="Of one tool call.")
    request_timeout_s: float = Field(default=3600.0, ge=1, description="Of one model call.")


class DriverAgent[O: DriverAgentOptions](BaseAgent):
    """Base of a Harbor agent of ours; a subclass sets `options_model`, to O."""

    capabilities = AgentCapabilities(base_url=True)

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """Take Harbor's arguments, and the fields of `options_model`.

        Raises:
            ConfigError: an option is unknown or wrong, or there is no endpoint or key.
        """
        harbor = {name: options.pop(name) for name in _HARBOR_ARGUMENTS & set(options)}
        try:
            self._chosen = cast(O, self.parse_options(options))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        super().__init__(logs_dir, model_name, **harbor)
        self._api_key = self._chosen.api_key or os.environ.get(self._chosen.api_key_variable, "")
        if not self._chosen.base_url or not self._api_key:
            raise ConfigError(
                f"{type(self).__name__} needs base_url and api_key (or api_key_variable), for example"
                " --agent-kwarg base_url=http://127.0.0.1:PORT/v1 --agent-kwarg api_key_variable=NAME"
            )

    @classmethod
    @override
    def resolve_model_connection_config(cls, *args: Any, **kwargs: Any) -> ResolvedModelConnection:
        """Nothing for Harbor to resolve: the endpoint and the key are options of this agent."""
        return ResolvedModelConnection(can_configure_base_url=True)

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """Nothing to disable: no tool of such an agent reaches the web from here."""
