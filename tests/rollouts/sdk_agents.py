"""Two small Harbor agents of the `module:Class` kind, on the SDKs of Anthropic and OpenAI.

They call the model from the driver, and their one tool acts through `environment.exec`.
"""

import json
import os
from abc import abstractmethod
from typing import Any, override

import anthropic
import openai
from harbor.agents.agent_auth_resolution import ResolvedModelConnection
from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

type Body = dict[str, Any]

PARAMETERS: Body = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
MAX_TURNS = 20


class _Terminal(BaseAgent):
    """Asks, runs what was called, and asks again until nothing is called."""

    def __init__(self, *args: Any, base_url: str, api_key_variable: str, **harbor: Any) -> None:
        super().__init__(*args, **harbor)
        self.endpoint, self.key = base_url, os.environ[api_key_variable]

    @override
    def version(self) -> str:
        return "1"

    @classmethod
    @override
    def resolve_model_connection_config(cls, *args: Any, **kwargs: Any) -> ResolvedModelConnection:
        return ResolvedModelConnection(can_configure_base_url=True)

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """It has none."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    async def terminal(self, environment: BaseEnvironment, arguments: Body) -> str:
        command = arguments.get("command")
        if not isinstance(command, str):
            return "the call needs a command"
        result = await environment.exec(command, timeout_sec=30)
        return (result.stdout or "") + (result.stderr or "")

    @override
    @abstractmethod
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None: ...


class AnthropicTerminal(_Terminal):
    @staticmethod
    @override
    def name() -> str:
        return "anthropic-terminal"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        messages: list[Any] = [{"role": "user", "content": instruction}]
        base_url = self.endpoint.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=self.key) as client:
            for _ in range(MAX_TURNS):
                async with client.messages.stream(
                    model="policy",
                    max_tokens=1000,
                    system="You have a terminal.",
                    messages=messages,
                    tools=[{"name": "terminal", "description": "A shell.", "input_schema": PARAMETERS}],
                ) as stream:
                    answer = await stream.get_final_message()
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    return
                results: list[Body] = []
                for call in calls:
                    output = await self.terminal(environment, call.input)  # pyright: ignore[reportArgumentType]
                    results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
                messages += [
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": results},
                ]


class ResponsesTerminal(_Terminal):
    @staticmethod
    @override
    def name() -> str:
        return "responses-terminal"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        items: list[Any] = [{"role": "user", "content": instruction}]
        async with openai.AsyncOpenAI(base_url=self.endpoint, api_key=self.key) as client:
            for _ in range(MAX_TURNS):
                answer = await client.responses.create(
                    model="policy",
                    instructions="You have a terminal.",
                    input=items,
                    tools=[
                        {"type": "function", "name": "terminal", "parameters": PARAMETERS, "strict": False}
                    ],
                )
                items += answer.output
                calls = [item for item in answer.output if item.type == "function_call"]
                if not calls:
                    return
                for call in calls:
                    output = await self.terminal(environment, _object(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def _object(arguments: str) -> Body:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class InsideShell(BaseInstalledAgent):
    """Runs one command in the environment, with the model's address and key in its variables."""

    def __init__(self, *args: Any, base_url: str, api_key_variable: str, command: str, **harbor: Any) -> None:
        super().__init__(*args, **harbor)
        self.command = command
        self.variables = {"URL": base_url, "KEY": os.environ[api_key_variable]}

    @staticmethod
    @override
    def name() -> str:
        return "inside-shell"

    @classmethod
    @override
    def resolve_model_connection_config(cls, *args: Any, **kwargs: Any) -> ResolvedModelConnection:
        return ResolvedModelConnection(can_configure_base_url=True)

    @override
    async def install(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self.exec_as_agent(environment, self.command, env=self.variables)

    @override
    def populate_context_post_run(self, context: AgentContext) -> None:
        """It says nothing of itself."""


class OneCall(_Terminal):
    """Asks the model once, and leaves what it said where a verifier can read it."""

    @staticmethod
    @override
    def name() -> str:
        return "one-call"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        async with openai.AsyncOpenAI(base_url=self.endpoint, api_key=self.key) as client:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": instruction}]
            )
