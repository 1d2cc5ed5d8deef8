"""A Harbor agent of two model calls, for runs that are killed: what it says decides its reward."""

import base64
from typing import Any, override

import openai
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from tests.rollouts.sdk_agents import _Terminal


class Teller(_Terminal):
    """Asks twice, and puts down each answer where the verifier reads it."""

    @staticmethod
    @override
    def name() -> str:
        return "teller"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        messages: list[Any] = [{"role": "user", "content": instruction}]
        async with openai.AsyncOpenAI(base_url=self.endpoint, api_key=self.key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message
                calls = [call for call in said.tool_calls or () if call.type == "function"]
                words = [said.content or "", *(f"{c.function.name} {c.function.arguments}" for c in calls)]
                text = base64.b64encode("\n".join(words).encode()).decode()
                await environment.exec(f"echo {text} >> /logs/agent/said")
                messages.append(said)
                messages += [{"role": "tool", "tool_call_id": call.id, "content": "no"} for call in calls]
                messages += [] if calls else [{"role": "user", "content": "go on"}]
