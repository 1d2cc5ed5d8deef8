"""Harbor agents of the campaigns: one whose words decide its reward, and one that does what it is told."""

import asyncio
import base64
import json
import socket
import struct
from typing import Any, override
from urllib.parse import urlsplit

import openai
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from tests.rollouts.sdk_agents import PARAMETERS, _Terminal


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


_COMMAND_S = 6
"""Longest time of one command; some hang on purpose."""
_OUTPUT_CHARACTERS = 8000
"""Of a command's output, what the policy is shown."""
_HALF_REQUESTS = (
    b"GET /v1/models HTTP/1.1\r\nHost:",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"",
)
"""What a connection says before it falls silent: half a head, half a body, TLS, nothing."""


class Caller(_Terminal):
    """Does what its policy's calls say: a command of the sandbox, or, after an @, something of its own."""

    def __init__(self, *args: Any, closed_key: str, **harbor: Any) -> None:
        super().__init__(*args, **harbor)
        self._closed_key = closed_key
        self._connections: list[socket.socket] = []

    @staticmethod
    @override
    def name() -> str:
        return "caller"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        messages: list[Any] = [{"role": "user", "content": instruction}]
        tool: Any = {"type": "function", "function": {"name": "terminal", "parameters": PARAMETERS}}
        async with openai.AsyncOpenAI(base_url=self.endpoint, api_key=self.key, max_retries=0) as client:
            try:
                while True:
                    answer = await client.chat.completions.create(
                        model="policy", messages=messages, tools=[tool]
                    )
                    said = answer.choices[0].message
                    messages.append(said)
                    if not said.tool_calls:
                        return
                    for call in said.tool_calls:
                        assert call.type == "function"
                        output = await self._act(environment, json.loads(call.function.arguments)["command"])
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
            finally:
                for connection in self._connections:
                    # Half of them end with a reset instead of a goodbye.
                    linger = struct.pack("ii", len(self._connections) % 2, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    connection.close()

    async def _act(self, environment: BaseEnvironment, command: str) -> str:
        word, _, argument = command.partition(" ")
        if word == "@raise":
            raise RuntimeError("the agent's program has a bug")
        if word == "@hang":
            await asyncio.sleep(3600)
        if word == "@keys":
            return await self._try_keys()
        if word == "@sockets":
            return await self._open_connections(int(argument))
        try:
            result = await environment.exec(command, timeout_sec=_COMMAND_S)
            output = (result.stdout or "") + (result.stderr or "")
        except TimeoutError:
            output = "timeout"
        if self.key in output:
            raise RuntimeError("a command saw the key of its rollout")
        return output[-_OUTPUT_CHARACTERS:]

    async def _try_keys(self) -> str:
        """Call the proxy with keys that are not this rollout's; each must be refused."""
        for key in (self._closed_key, self.key[::-1], self.key[:-1], self.key.upper()):
            async with openai.AsyncOpenAI(base_url=self.endpoint, api_key=key, max_retries=0) as client:
                try:
                    await client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "who am I?"}]
                    )
                except openai.AuthenticationError:
                    continue
                raise RuntimeError("the proxy answered a key that is nobody's")
        return "refused"

    async def _open_connections(self, count: int) -> str:
        address = urlsplit(self.endpoint)
        for number in range(count):
            connection = socket.create_connection((address.hostname, address.port), timeout=5)
            connection.sendall(_HALF_REQUESTS[number % len(_HALF_REQUESTS)])
            self._connections.append(connection)
        return f"{count} connections"
