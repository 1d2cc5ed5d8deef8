"""`OpenHandsHarborAgent`: the OpenHands SDK as a Harbor agent that runs here, with its tools in the trial.

Usable by Harbor itself: `--agent pilotage.rollouts:OpenHandsHarborAgent`, options by `--agent-kwarg`. The
model is called from this process and every tool acts through `environment.exec` and file transfer, so it
works in any Harbor environment, one without a route to the model included. The key never enters the
environment.
"""

import asyncio
import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, override

from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field, field_validator

from pilotage.errors import ConfigError
from pilotage.rollouts.driver_agent import DriverAgent, DriverAgentOptions
from pilotage.rollouts.mcp_servers import McpServer
from pilotage.rollouts.skills import read_skills
from pilotage.rollouts.third_party import prepare

_DEFAULT_SYSTEM_PROMPT = (
    "You are a software engineer. Solve the task with your tools, then finish. Do not ask questions.\n"
)


class OpenHandsOptions(DriverAgentOptions):
    """Options of `OpenHandsHarborAgent`."""

    tools: tuple[str, ...] = Field(
        default=("terminal", "localization_finish"),
        description="Names from terminal, code_search, localization_finish, finish; comma-separated.",
    )
    system_prompt_file: str | None = Field(default=None, description="Text file; default: two sentences.")
    skills: tuple[str, ...] = Field(default=(), description="Text files that follow the system prompt.")
    driver_mcp_servers: dict[str, McpServer] = Field(
        default_factory=dict, description="Name to {command, args} or {url}; the agent gets their tools too."
    )
    max_output_chars: int = Field(default=10_000, ge=100, description="Of one tool call.")

    @field_validator("tools", "skills", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value


class OpenHandsHarborAgent(DriverAgent[OpenHandsOptions]):
    """Runs one OpenHands conversation per trial."""

    options_model = OpenHandsOptions
    capabilities = AgentCapabilities(base_url=True, skills=True)

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """See `DriverAgent`.

        Raises:
            ConfigError: also a file that cannot be read.
        """
        super().__init__(logs_dir, model_name, **options)
        self._system_prompt = _system_prompt(self._chosen.system_prompt_file, self._chosen.skills)

    @staticmethod
    @override
    def name() -> str:
        return "pilotage-openhands"

    @override
    def version(self) -> str:
        return _sdk_version()

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Import the SDK, which takes seconds the first time in a process, and read the skills inside."""
        prepare()
        if self.skills_dir is not None:
            self._system_prompt = _joined(
                [self._system_prompt, *await read_skills(environment, self.skills_dir)]
            )
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
            mcp_servers=chosen.driver_mcp_servers,
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


@cache
def _sdk_version() -> str:
    return version("openhands-sdk")  # reads the package's metadata


def _system_prompt(file: str | None, skills: Sequence[str]) -> str:
    parts = [_DEFAULT_SYSTEM_PROMPT if file is None else _text(file, "system_prompt_file")]
    parts += [_text(skill, "skills") for skill in skills]
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part.strip("\n") for part in parts)


def _text(path: str, option: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
