"""One OpenHands conversation over a trial's environment, as the SDK wants to be driven.

The SDK's own loop, agent and message handling run unchanged. What is set here keeps rollouts comparable and
token-exact: no agent context (it puts the date into the prompt), no condenser, no default tools, sampling
left to the proxy, retries few and quick.
"""

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, override

import httpx
from openhands.sdk import Agent, LocalConversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.sdk.event import ActionEvent, Event, MessageEvent, ObservationEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import TextContent
from openhands.sdk.llm.exceptions import LLMContextWindowExceedError
from openhands.sdk.mcp.client import MCPClient
from openhands.sdk.mcp.config import MCPServer
from openhands.sdk.mcp.utils import DefaultMCPToolProvider
from pydantic import SecretStr

from pilotage.rollouts.mcp_servers import McpServer
from pilotage.rollouts.policy_llm import PolicyLLM, open_client
from pilotage.rollouts.report import AgentFacts, EnvironmentLostError, StopReason
from pilotage.rollouts.tools import ToolSession, close_session, open_session, tool_specs

_MAX_FACT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSettings:
    """What distinguishes one agent setup from another."""

    base_url: str
    api_key: str
    model: str
    tools: tuple[str, ...]
    mcp_servers: Mapping[str, McpServer]
    system_prompt: str
    max_turns: int
    request_timeout_s: float
    """Of one model call; sampling may queue, so the trial's own deadline should come first."""


def _llm(settings: ConversationSettings, client: httpx.AsyncClient) -> PolicyLLM:
    llm = PolicyLLM(
        model=settings.model,
        base_url=settings.base_url,
        api_key=SecretStr(settings.api_key),
        usage_id="agent",
        reasoning_effort=None,
        # Without this the SDK takes an unknown model for a reasoning model and rewrites its requests.
        capability_overrides={"supports_reasoning_effort": False, "supports_sampling_params": True},
        num_retries=3,
        retry_min_wait=1,
        retry_max_wait=4,
        timeout=int(settings.request_timeout_s),
        input_cost_per_token=0.0,
        output_cost_per_token=0.0,
        openrouter_site_url="",
        openrouter_app_name="",
    )
    llm.call_through(client)
    return llm


class _McpTools(DefaultMCPToolProvider):
    """Notes a server that does not start; the SDK would go on without its tools."""

    def __init__(self, session: ToolSession) -> None:
        self._session = session

    @override
    def create_tools(
        self, mcp_config: dict[str, MCPServer], timeout: float = 30.0, **hooks: Any
    ) -> MCPClient:
        try:
            client = super().create_tools(mcp_config, timeout, **hooks)
        except Exception as error:
            raise self._failed(mcp_config, str(error.__cause__ or error)) from error
        # Of several servers, those that start are enough for the SDK; their names come before their tools'.
        prefixes = [f"{name}_" if len(mcp_config) > 1 else "" for name in mcp_config]
        silent = [
            name
            for name, prefix in zip(mcp_config, prefixes, strict=True)
            if not any(tool.name.startswith(prefix) for tool in client.tools)
        ]
        if silent:
            client.sync_close()
            raise self._failed(silent, "no tool came from it")
        return client

    def _failed(self, names: Iterable[str], reason: str) -> EnvironmentLostError:
        failure = EnvironmentLostError(f"the MCP server {', '.join(names)} did not start: {reason}")
        self._session.environment_failure = failure
        return failure


def _conversation(
    settings: ConversationSettings,
    session: ToolSession,
    session_key: str,
    workspace: str,
    client: httpx.AsyncClient,
) -> LocalConversation:
    def end_early(event: Event) -> None:
        # Called on the loop's thread inside the SDK's step, which holds the lock of the state.
        if session.environment_failure is not None:
            conversation.state.execution_status = ConversationExecutionStatus.PAUSED
        elif isinstance(event, ObservationEvent) and session.hand_ins:
            conversation.state.execution_status = ConversationExecutionStatus.FINISHED

    agent = Agent(
        llm=_llm(settings, client),
        tools=tool_specs(settings.tools, session_key),
        system_prompt=settings.system_prompt,
        include_default_tools=[],
        mcp_config={name: _mcp_server(server) for name, server in settings.mcp_servers.items()},
    )
    conversation = LocalConversation(
        agent=agent,
        workspace=workspace,
        visualizer=None,
        conversation_id=uuid.UUID(session_key),
        max_iteration_per_run=settings.max_turns,
        callbacks=[end_early],
        mcp_tool_provider=_McpTools(session),
        delete_on_close=False,
    )
    return conversation


def _mcp_server(server: McpServer) -> MCPServer:
    return MCPServer(command=server.command, args=list(server.args) or None, url=server.url)


async def converse(
    settings: ConversationSettings, session: ToolSession, instruction: str, workspace: str
) -> AgentFacts:
    """Run one conversation to its end and say how it ended; never raises for what a policy does.

    Args:
        workspace: an existing directory of this machine that the SDK may look at; the tools do not.

    Raises:
        asyncio.CancelledError: as usual; the SDK turns it into a pause, which is undone here.
        EnvironmentLostError: a tool could not use the environment; the conversation ends at once.
        ConfigError: a tool name is unknown.
    """
    session_key = uuid.uuid4().hex
    open_session(session_key, session)
    try:
        async with open_client() as client:
            conversation = _conversation(settings, session, session_key, workspace, client)
            try:
                error = await _run_to_end(conversation, session, instruction)
            finally:
                await asyncio.shield(asyncio.to_thread(conversation.close))
    finally:
        close_session(session_key)
    if session.environment_failure is not None:
        raise EnvironmentLostError(str(session.environment_failure)) from session.environment_failure
    if conversation.state.execution_status == ConversationExecutionStatus.PAUSED:
        raise asyncio.CancelledError
    return _facts(conversation, session, error)


async def _run_to_end(
    conversation: LocalConversation, session: ToolSession, instruction: str
) -> ConversationRunError | None:
    # MCP servers start here, for which the SDK waits; other trials of this loop must not.
    await asyncio.to_thread(conversation.send_message, instruction)
    if session.environment_failure is not None:
        return None
    try:
        await conversation.arun()
    except ConversationRunError as error:
        return error
    return None


def _facts(
    conversation: LocalConversation, session: ToolSession, error: ConversationRunError | None
) -> AgentFacts:
    events = list(conversation.state.events)
    # In order: one entry a tool call, or one for a reply without any.
    replies = [
        event.llm_response_id
        for event in events
        if isinstance(event, ActionEvent | MessageEvent) and event.source == "agent"
    ]
    calls = [event.llm_response_id for event in events if isinstance(event, ActionEvent)]
    cause = error.__cause__ if error is not None else None
    return AgentFacts(
        stop_reason=_stop_reason(conversation, events, cause),
        turns=len(set(replies)),
        hand_ins=tuple(session.hand_ins),
        rejected_hand_ins=session.rejected_hand_ins,
        last_turn_calls=sum(call == replies[-1] for call in calls) if replies else 0,
        last_message=_last_message(events)[:_MAX_FACT_CHARS],
        error=f"{type(cause).__name__}: {cause}"[:_MAX_FACT_CHARS] if cause is not None else "",
    )


def _stop_reason(
    conversation: LocalConversation, events: list[Event], cause: BaseException | None
) -> StopReason:
    if isinstance(cause, LLMContextWindowExceedError):
        return StopReason.CONTEXT_EXCEEDED
    if conversation.state.execution_status == ConversationExecutionStatus.FINISHED:
        return StopReason.FINISHED
    if conversation.state.execution_status == ConversationExecutionStatus.STUCK:
        return StopReason.STUCK
    codes = [event.code for event in events if isinstance(event, ConversationErrorEvent)]
    return StopReason.MAX_TURNS if "MaxIterationsReached" in codes else StopReason.ERROR


def _last_message(events: list[Event]) -> str:
    for event in reversed(events):
        if isinstance(event, MessageEvent) and event.source == "agent":
            return "".join(part.text for part in event.llm_message.content if isinstance(part, TextContent))
    return ""
