"""The tools that an OpenHands agent may be given, by name; each acts in the trial's environment.

A tool runs in a worker thread of the SDK and hands its work to the event loop that owns the environment.
Schemas are constant: no path, date or rollout id, and not the two optional arguments that the SDK adds to
every tool; so the prompt of a task is the same for each of its rollouts.
"""

import asyncio
import concurrent.futures
import json
import secrets
import shlex
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self, override

import orjson
from harbor.environments.base import BaseEnvironment, ExecResult
from litellm import ChatCompletionToolParam, ChatCompletionToolParamFunctionChunk
from openhands.sdk.tool import Action, Observation, Tool, ToolDefinition, ToolExecutor, register_tool
from openhands.sdk.tool.builtins import FinishTool
from openhands.sdk.tool.schema import Schema
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pilotage.errors import ConfigError
from pilotage.localization.scoring import InvalidAnswerError, location_record, places_of
from pilotage.rollouts.code_search import NO_MATCH, search_command, search_result

LOCATIONS_PATH = "/logs/agent/locations.json"
"""Where the verifier of a localization task finds the hand-in."""


@dataclass(slots=True, kw_only=True, eq=False)
class ToolSession:
    """What the tools of one rollout share."""

    environment: BaseEnvironment
    loop: asyncio.AbstractEventLoop
    command_timeout_s: float
    max_output_chars: int
    cwd: str | None = None
    """Where the last terminal command ended; None before the first, which is the environment's workdir."""
    hand_ins: list[str] = field(default_factory=list[str])
    """Every accepted hand-in, as JSON; a rollout should have one."""
    rejected_hand_ins: int = 0
    environment_failure: Exception | None = None
    """Why the environment could not be used; nothing the policy does can help, so the rollout ends."""
    _running: set[concurrent.futures.Future[Any]] = field(default_factory=set[concurrent.futures.Future[Any]])

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the environment's loop and wait for it; for tool threads only."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._running.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except Exception as error:
            self.environment_failure = error
            raise
        finally:
            self._running.discard(future)

    def interrupt(self) -> None:
        """Cancel what runs, which kills its processes; for any thread."""
        for future in tuple(self._running):
            future.cancel()


_sessions: dict[str, ToolSession] = {}
"""By key: the SDK makes tools from a name and JSON parameters, so an object travels as a key."""


def open_session(key: str, session: ToolSession) -> None:
    """Make `session` reachable for tools that are made with `key`."""
    _sessions[key] = session


def close_session(key: str) -> None:
    """Forget the session; its tools fail from here on."""
    _sessions.pop(key, None)


@cache
def _parameters(action_type: type[Schema]) -> bytes:
    """Return the JSON schema of a tool's arguments; the SDK asks for it at every call of the model."""
    schema = action_type.to_mcp_schema()
    schema.pop("description", None)  # the docstring of our class
    return orjson.dumps(schema)


class _SessionTool[A: Action, O: Observation](ToolDefinition[A, O]):
    """A tool whose schema is its own arguments and nothing else."""

    @override
    def to_openai_tool(
        self,
        add_security_risk_prediction: bool = False,
        action_type: type[Schema] | None = None,
    ) -> ChatCompletionToolParam:
        return ChatCompletionToolParam(
            type="function",
            function=ChatCompletionToolParamFunctionChunk(
                name=self.name,
                description=self.description,
                parameters=orjson.loads(_parameters(action_type or self.action_type)),
            ),
        )


class _Executor[A: Action, O: Observation](ToolExecutor[A, O]):
    def __init__(self, session: ToolSession) -> None:
        self._session = session

    @override
    def interrupt(self) -> None:
        self._session.interrupt()


def shortened(text: str, max_chars: int) -> str:
    """Return `text` with its middle cut out where it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters omitted ...]\n{text[-half:]}"


# --- terminal ---


class EnvironmentTerminalAction(Action):
    """Arguments of `terminal`."""

    command: str = Field(description="Bash command to run.")


class EnvironmentTerminalObservation(Observation):
    """What a command printed."""


def terminal_command(command: str, *, cwd: str | None, marker: str) -> str:
    """Wrap a command so that it starts where the last one ended and tells where it ended itself."""
    start = f"cd -- {shlex.quote(cwd)} 2>/dev/null; " if cwd is not None else ""
    report = f"""trap 'printf "\\n%s%s" {marker} "$PWD"' EXIT; exec 2>&1; """
    return f"{start}{report}eval {shlex.quote(command)}"


def split_terminal_output(output: str, marker: str) -> tuple[str, str | None]:
    """Return (what the command printed, where it ended); None where it was killed before it could tell."""
    text, found, cwd = output.rpartition(f"\n{marker}")
    return (text, cwd) if found else (output, None)


class _TerminalExecutor(_Executor[EnvironmentTerminalAction, EnvironmentTerminalObservation]):
    @override
    def __call__(
        self, action: EnvironmentTerminalAction, conversation: object = None
    ) -> EnvironmentTerminalObservation:
        session = self._session
        marker = f"__{secrets.token_hex(8)}__"
        result: ExecResult = session.call(
            session.environment.exec(
                terminal_command(action.command, cwd=session.cwd, marker=marker),
                timeout_sec=session.command_timeout_s,  # pyright: ignore[reportArgumentType]  # Harbor says int
            )
        )
        text, cwd = split_terminal_output((result.stdout or "") + (result.stderr or ""), marker)
        session.cwd = cwd or session.cwd
        shown = shortened(text.strip("\n"), session.max_output_chars)
        return EnvironmentTerminalObservation.from_text("\n".join(filter(None, [shown, self._note(result)])))

    def _note(self, result: ExecResult) -> str:
        if result.return_code == 124:
            return f"[timed out after {self._session.command_timeout_s:g} s]"
        return f"[exit code {result.return_code}]" if result.return_code else ""


class EnvironmentTerminalTool(_SessionTool[EnvironmentTerminalAction, EnvironmentTerminalObservation]):
    """`terminal(command)`."""

    name = "terminal"

    @classmethod
    @override
    def create(cls, conv_state: object = None, *, session: str) -> Sequence[Self]:
        return [
            cls(
                description="Run a bash command. The working directory persists between commands.",
                action_type=EnvironmentTerminalAction,
                observation_type=EnvironmentTerminalObservation,
                executor=_TerminalExecutor(_sessions[session]),
            )
        ]


# --- code_search ---


class CodeSearchAction(Action):
    """Arguments of `code_search`."""

    query: str = Field(description="Identifiers to look for.")


class CodeSearchObservation(Observation):
    """The definitions that were found."""


class _CodeSearchExecutor(_Executor[CodeSearchAction, CodeSearchObservation]):
    @override
    def __call__(self, action: CodeSearchAction, conversation: object = None) -> CodeSearchObservation:
        command = search_command(action.query)
        if command is None:
            return CodeSearchObservation.from_text(NO_MATCH)
        result: ExecResult = self._session.call(
            self._session.environment.exec(
                command,
                timeout_sec=self._session.command_timeout_s,  # pyright: ignore[reportArgumentType]
            )
        )
        if result.stderr and not result.stdout:
            return CodeSearchObservation.from_text(f"search failed: {result.stderr}", is_error=True)
        return CodeSearchObservation.from_text(search_result(result.stdout or ""))


class CodeSearchTool(_SessionTool[CodeSearchAction, CodeSearchObservation]):
    """`code_search(query)`."""

    name = "code_search"

    @classmethod
    @override
    def create(cls, conv_state: object = None, *, session: str) -> Sequence[Self]:
        return [
            cls(
                description="Find Python definitions by identifiers. One per line: path::Class::function.",
                action_type=CodeSearchAction,
                observation_type=CodeSearchObservation,
                executor=_CodeSearchExecutor(_sessions[session]),
            )
        ]


# --- localization_finish ---


class CodeLocation(BaseModel):
    """One place in the code."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str = Field(description="Path of the file.", min_length=1)
    class_name: str | None = Field(default=None, description="Name of the class.")
    function_name: str | None = Field(default=None, description="Name of the function or method.")

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        """Accept `path::Class::method` too, as `code_search` prints it."""
        return location_record(value) if isinstance(value, str) else value


class LocalizationFinishAction(Action):
    """Arguments of `localization_finish`."""

    locations: list[CodeLocation] = Field(description="Places in the code to change.")


class LocalizationFinishObservation(Observation):
    """Whether the hand-in was accepted."""


class _LocalizationFinishExecutor(_Executor[LocalizationFinishAction, LocalizationFinishObservation]):
    @override
    def __call__(
        self, action: LocalizationFinishAction, conversation: object = None
    ) -> LocalizationFinishObservation:
        session = self._session
        records = [location.model_dump(exclude_none=True) for location in action.locations]
        if complaint := self._complaint(records):
            session.rejected_hand_ins += 1
            return LocalizationFinishObservation.from_text(complaint, is_error=True)
        session.hand_ins.append(json.dumps({"locations": records}))
        if len(session.hand_ins) > 1:
            return LocalizationFinishObservation.from_text("already handed in", is_error=True)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(session.hand_ins[0])
            file.flush()
            session.call(session.environment.upload_file(Path(file.name), LOCATIONS_PATH))
        return LocalizationFinishObservation.from_text("handed in")

    @staticmethod
    def _complaint(records: list[dict[str, str]]) -> str:
        if not records:
            return "give at least one location"
        try:
            places_of(records)
        except InvalidAnswerError as error:
            return str(error)
        return ""


class LocalizationFinishTool(_SessionTool[LocalizationFinishAction, LocalizationFinishObservation]):
    """`localization_finish(locations)`; it ends the conversation."""

    name = "localization_finish"

    @classmethod
    @override
    def create(cls, conv_state: object = None, *, session: str) -> Sequence[Self]:
        return [
            cls(
                description="Hand in the places to change and finish. Call it once.",
                action_type=LocalizationFinishAction,
                observation_type=LocalizationFinishObservation,
                executor=_LocalizationFinishExecutor(_sessions[session]),
            )
        ]


_OURS: dict[str, type[ToolDefinition[Any, Any]]] = {
    tool.name: tool for tool in (EnvironmentTerminalTool, CodeSearchTool, LocalizationFinishTool)
}
_BUILT_IN = {FinishTool.name: FinishTool.__name__}
TOOL_NAMES = (*_OURS, *_BUILT_IN)

for _name, _tool in _OURS.items():
    register_tool(_name, _tool)


def tool_specs(names: Sequence[str], session_key: str) -> list[Tool]:
    """Return the SDK's specifications of the named tools, in order.

    Raises:
        ConfigError: a name is unknown, or given twice.
    """
    unknown = [name for name in names if name not in TOOL_NAMES]
    if unknown or len(set(names)) != len(names) or not names:
        raise ConfigError(f"tools: got {list(names)}; choose each once from {', '.join(TOOL_NAMES)}")
    return [
        Tool(name=_BUILT_IN[name]) if name in _BUILT_IN else Tool(name=name, params={"session": session_key})
        for name in names
    ]
