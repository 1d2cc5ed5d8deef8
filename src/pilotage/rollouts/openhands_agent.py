"""`OpenHandsHarborAgent`: the OpenHands SDK as a Harbor agent that runs here, with its tools in the trial.

Usable by Harbor itself: `--agent pilotage.rollouts:OpenHandsHarborAgent`, options by `--agent-kwarg`. The
model is called from this process and every tool acts through `environment.exec` and file transfer, so it
works in any Harbor environment, one without a route to the model included. The key never enters the
environment.
"""

import asyncio
import importlib
import inspect
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, override

from harbor.agents.agent_auth_resolution import ResolvedModelConnection
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field, field_validator

from pilotage.errors import ConfigError
from pilotage.rollouts.third_party import prepare

_DEFAULT_SYSTEM_PROMPT = (
    "You are a software engineer. Solve the task with your tools, then finish. Do not ask questions.\n"
)
_HARBOR_ARGUMENTS = set(inspect.signature(BaseAgent.__init__).parameters) - {"base_url"}


class OpenHandsOptions(AgentOptions):
    """What `--agent-kwarg NAME=VALUE` and a recipe's agent options may set; an unknown name is refused."""

    base_url: str | None = Field(default=None, description="OpenAI-compatible endpoint, ending in /v1.")
    api_key: str = Field(default="", description="Key of the endpoint.")
    api_key_variable: str = Field(default="", description="Environment variable that holds the key instead.")
    tools: tuple[str, ...] = Field(
        default=("terminal", "localization_finish"),
        description="Names from terminal, code_search, localization_finish, finish; comma-separated.",
    )
    system_prompt_file: str | None = Field(default=None, description="Text file; default: two sentences.")
    skills: tuple[str, ...] = Field(default=(), description="Text files that follow the system prompt.")
    max_turns: int = Field(default=30, ge=1, description="Model calls before the conversation ends.")
    command_timeout_s: float = Field(default=60.0, gt=0, description="Of one tool call.")
    max_output_chars: int = Field(default=10_000, ge=100, description="Of one tool call.")
    request_timeout_s: float = Field(default=3600.0, ge=1, description="Of one model call.")

    @field_validator("tools", "skills", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value


class OpenHandsHarborAgent(BaseAgent):
    """Runs one OpenHands conversation per trial."""

    capabilities = AgentCapabilities(base_url=True)
    options_model = OpenHandsOptions

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """Take Harbor's arguments, and the fields of `OpenHandsOptions`.

        Raises:
            ConfigError: an option is unknown or wrong, no endpoint or key, or a file that cannot be read.
        """
        harbor = {name: options.pop(name) for name in _HARBOR_ARGUMENTS & set(options)}
        try:
            self._chosen = chosen = cast(OpenHandsOptions, self.parse_options(options))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        super().__init__(logs_dir, model_name, **harbor)
        self._api_key = chosen.api_key or os.environ.get(chosen.api_key_variable, "")
        self._system_prompt = _system_prompt(chosen.system_prompt_file, chosen.skills)
        if not chosen.base_url or not self._api_key:
            raise ConfigError(
                "OpenHandsHarborAgent needs base_url and api_key (or api_key_variable), for example"
                " --agent-kwarg base_url=http://127.0.0.1:PORT/v1 --agent-kwarg api_key_variable=NAME"
            )

    @staticmethod
    @override
    def name() -> str:
        return "pilotage-openhands"

    @override
    def version(self) -> str:
        return version("openhands-sdk")

    @classmethod
    @override
    def resolve_model_connection_config(cls, *args: Any, **kwargs: Any) -> ResolvedModelConnection:
        """Nothing for Harbor to resolve: the endpoint and the key are options of this agent."""
        return ResolvedModelConnection(can_configure_base_url=True)

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """Nothing to disable: no tool of this agent reaches the web from here."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Import the SDK, which takes seconds the first time in a process."""
        prepare()
        # In a thread: other trials of this event loop have deadlines.
        await asyncio.to_thread(importlib.import_module, "pilotage.rollouts.conversation")

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Converse until the agent finishes or its budget is spent; the context says how it ended."""
        from pilotage.rollouts.conversation import ConversationSettings, converse
        from pilotage.rollouts.tools import ToolSession

        chosen = self._chosen
        settings = ConversationSettings(
            base_url=chosen.base_url or "",
            api_key=self._api_key,
            model=self.model_name or "openai/policy",
            tools=chosen.tools,
            system_prompt=self._system_prompt,
            max_turns=chosen.max_turns,
            request_timeout_s=chosen.request_timeout_s,
        )
        session = ToolSession(
            environment=environment,
            loop=asyncio.get_running_loop(),
            command_timeout_s=chosen.command_timeout_s,
            max_output_chars=chosen.max_output_chars,
        )
        facts = await converse(settings, session, instruction, str(self.logs_dir))
        context.metadata = facts.to_metadata()


def _system_prompt(file: str | None, skills: Sequence[str]) -> str:
    parts = [_DEFAULT_SYSTEM_PROMPT if file is None else _text(file, "system_prompt_file")]
    parts += [_text(skill, "skills") for skill in skills]
    return "\n".join(part.strip("\n") for part in parts)


def _text(path: str, option: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
