"""`OpenHandsHarborAgent`: the OpenHands SDK as a Harbor agent that runs here, with its tools in the trial.

Usable by Harbor itself: `--agent pilotage.rollouts:OpenHandsHarborAgent`, options by `--ak`. The model is
called from this process and every tool acts through `environment.exec` and file transfer, so it works in any
Harbor environment, one without a route to the model included. The key never enters the environment.
"""

import asyncio
import importlib
import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from pilotage.errors import ConfigError
from pilotage.rollouts.third_party import prepare

DEFAULT_TOOLS = ("terminal", "localization_finish")
_DEFAULT_SYSTEM_PROMPT = (
    "You are a software engineer. Solve the task with your tools, then finish. Do not ask questions.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHandsOptions:
    """What `--ak NAME=VALUE` and a recipe's agent options may set."""

    base_url: str = ""
    """OpenAI-compatible endpoint, ending in /v1."""
    api_key: str = ""
    api_key_variable: str = ""
    """Environment variable of this process that holds the key, instead of `api_key`."""
    tools: Sequence[str] | str = DEFAULT_TOOLS
    """Names from terminal, code_search, localization_finish, finish; a list, or separated by commas."""
    system_prompt_file: str | None = None
    skills: Sequence[str] | str = ()
    """Text files that follow the system prompt, in order."""
    max_turns: int = 30
    """Model calls before the conversation ends."""
    command_timeout_s: float = 60.0
    """Of one tool call."""
    max_output_chars: int = 10_000
    """Of one tool call."""
    request_timeout_s: float = 3600.0
    """Of one model call."""


class OpenHandsHarborAgent(BaseAgent):
    """Runs one OpenHands conversation per trial."""

    def __init__(self, logs_dir: Path, model_name: str | None = None, **options: Any) -> None:
        """Take Harbor's arguments, and the fields of `OpenHandsOptions`.

        Raises:
            ConfigError: an option is unknown, no endpoint or key, or a file that cannot be read.
        """
        names = [field.name for field in fields(OpenHandsOptions)]
        ours = {name: options.pop(name) for name in names if name in options}
        known = inspect.signature(BaseAgent.__init__).parameters
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"OpenHandsHarborAgent has no option {unknown}; it has: {', '.join(names)}")
        # Harbor refuses a base_url for an agent that declares no model connection; this one is ours.
        super().__init__(logs_dir, model_name, **options)
        self._options = chosen = OpenHandsOptions(**ours)
        self._api_key = chosen.api_key or os.environ.get(chosen.api_key_variable, "")
        self._system_prompt = _system_prompt(chosen.system_prompt_file, _names(chosen.skills))
        if not chosen.base_url or not self._api_key:
            raise ConfigError(
                "OpenHandsHarborAgent needs base_url and api_key (or api_key_variable):"
                " --ak base_url=http://127.0.0.1:PORT/v1 --ak api_key_variable=NAME"
            )

    @staticmethod
    @override
    def name() -> str:
        return "pilotage-openhands"

    @override
    def version(self) -> str:
        return version("openhands-sdk")

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Import the SDK, which takes seconds the first time in a process."""
        prepare()
        importlib.import_module("pilotage.rollouts.conversation")

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Converse until the agent finishes or its budget is spent; the context says how it ended."""
        from pilotage.rollouts.conversation import ConversationSettings, converse
        from pilotage.rollouts.tools import ToolSession

        options = self._options
        settings = ConversationSettings(
            base_url=options.base_url,
            api_key=self._api_key,
            model=self.model_name or "openai/policy",
            tools=_names(options.tools),
            system_prompt=self._system_prompt,
            max_turns=int(options.max_turns),
            request_timeout_s=float(options.request_timeout_s),
        )
        session = ToolSession(
            environment=environment,
            loop=asyncio.get_running_loop(),
            command_timeout_s=float(options.command_timeout_s),
            max_output_chars=int(options.max_output_chars),
        )
        facts = await converse(settings, session, instruction, str(self.logs_dir))
        context.metadata = facts.to_metadata()


def _names(value: Sequence[str] | str) -> tuple[str, ...]:
    """Read a list, a JSON list or comma-separated names."""
    if not isinstance(value, str):
        return tuple(value)
    if value.lstrip().startswith("["):
        return tuple(json.loads(value))
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _system_prompt(file: str | None, skills: Sequence[str]) -> str:
    parts = [_DEFAULT_SYSTEM_PROMPT if file is None else _text(file, "system_prompt_file")]
    parts += [_text(skill, "skills") for skill in skills]
    return "\n".join(part.strip("\n") for part in parts)


def _text(path: str, option: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
