"""`MiniSweHarborAgent`: mini-swe-agent as a Harbor agent that runs here, with its shell in the trial.

Harbor's own `mini-swe-agent` installs itself into the environment over the network, for every trial. This one
is the library in this process: the model is called from here, and each command goes through
`environment.exec`, so it works in any Harbor environment and the key never enters it.
"""

import asyncio
import concurrent.futures
import importlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, override

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field

from pilotage.errors import ConfigError
from pilotage.rollouts.driver_agent import DriverAgent, DriverAgentOptions
from pilotage.rollouts.report import AgentFacts, EnvironmentLostError, StopReason
from pilotage.rollouts.third_party import prepare

_HAND_IN = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of a command's output with which the policy ends the task; the library's own word."""
_STOP_REASONS = {
    "Submitted": StopReason.FINISHED,
    "LimitsExceeded": StopReason.MAX_TURNS,
    "RepeatedFormatError": StopReason.STUCK,
    "ContextWindowExceededError": StopReason.CONTEXT_EXCEEDED,
}
"""Of the library's `exit_status`, which is an exception's name where one ended the conversation."""


class MiniSweOptions(DriverAgentOptions):
    """Options of `MiniSweHarborAgent`."""

    config_file: str | None = Field(
        default=None, description="mini-swe-agent's YAML; default: its mini.yaml."
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Shell:
    """The library's view of the trial's environment; used from its thread, works on the event loop's."""

    environment: BaseEnvironment
    loop: asyncio.AbstractEventLoop
    timeout_s: float
    variables: dict[str, str]
    system: dict[str, str]
    """What the library's prompt says of the machine: `system`, `release`, `version`, `machine`."""
    config: None = None
    failure: Exception | None = None
    """Why the environment could not be used; nothing that the policy does can help."""
    _is_stopped: bool = False
    _running: set[concurrent.futures.Future[Any]] = field(default_factory=set[concurrent.futures.Future[Any]])

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one command; raises the library's `Submitted` where it hands in."""
        from minisweagent.exceptions import LimitsExceeded, Submitted

        if self._is_stopped:
            raise LimitsExceeded({"role": "exit", "content": "", "extra": {"exit_status": "Stopped"}})
        future = asyncio.run_coroutine_threadsafe(self._exec(str(action.get("command", "")), cwd), self.loop)
        self._running.add(future)
        try:
            output = future.result()
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._running.discard(future)
        first, _, rest = output["output"].lstrip().partition("\n")
        if first.strip() == _HAND_IN and output["returncode"] == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        return output

    def stop(self) -> None:
        """Kill the command that runs and let no other start."""
        self._is_stopped = True
        for future in tuple(self._running):
            future.cancel()

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return what the library's templates may name."""
        return {**self.system, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """Return nothing: the proxy keeps the record."""
        return {}

    async def _exec(self, command: str, cwd: str) -> dict[str, Any]:
        result = await self.environment.exec(
            command,
            cwd=cwd or None,
            env=self.variables,
            timeout_sec=self.timeout_s,  # pyright: ignore[reportArgumentType]  # Harbor says int
        )
        text = (result.stdout or "") + (result.stderr or "")
        return {"output": text, "returncode": result.return_code, "exception_info": ""}


class MiniSweHarborAgent(DriverAgent[MiniSweOptions]):
    """Runs one mini-swe-agent conversation per trial."""

    options_model = MiniSweOptions

    @staticmethod
    @override
    def name() -> str:
        return "pilotage-mini-swe"

    @override
    def version(self) -> str:
        return version("mini-swe-agent")

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Import the library, which takes seconds the first time in a process.

        Raises:
            ConfigError: it is not installed.
        """
        prepare()
        try:
            await asyncio.to_thread(importlib.import_module, "minisweagent.models.litellm_model")
        except ModuleNotFoundError as error:
            raise ConfigError("mini-swe-agent is not installed: pip install mini-swe-agent") from error

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Converse until the policy hands in or its budget is spent; the context says how it ended."""
        import yaml
        from minisweagent.config import builtin_config_dir

        config_file = Path(self._chosen.config_file or builtin_config_dir / "mini.yaml")
        config: dict[str, Any] = yaml.safe_load(await asyncio.to_thread(config_file.read_text))
        shell = _Shell(
            environment=environment,
            loop=asyncio.get_running_loop(),
            timeout_s=self._chosen.command_timeout_s,
            variables=config.get("environment", {}).get("env", {}),
            system=await _system(environment),
        )
        # A thread of its own: the loop's are few, and a conversation takes minutes.
        thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="mini-swe")
        conversing = asyncio.get_running_loop().run_in_executor(
            thread, self._converse, shell, config, instruction
        )
        try:
            facts = await asyncio.shield(conversing)
        finally:
            shell.stop()
            thread.shutdown(wait=False)  # it ends with its command, or with the model call that it waits for
        if shell.failure is not None:
            raise EnvironmentLostError(str(shell.failure)) from shell.failure
        context.metadata = facts.to_metadata()

    def _converse(self, shell: _Shell, config: dict[str, Any], instruction: str) -> AgentFacts:
        """Run the library's loop; called in a thread, and never raises for what a policy does."""
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.models.litellm_model import LitellmModel

        settings: dict[str, Any] = {
            **config["model"],
            "model_name": self.model_name or "openai/policy",
            "model_kwargs": {
                **config["model"].get("model_kwargs", {}),
                "api_base": self._chosen.base_url,
                "api_key": self._api_key,
                "timeout": self._chosen.request_timeout_s,
            },
            "cost_tracking": "ignore_errors",
        }
        limits: dict[str, Any] = {"step_limit": self._chosen.max_turns, "cost_limit": 0.0}
        agent = DefaultAgent(LitellmModel(**settings), cast(Any, shell), **{**config["agent"], **limits})
        try:
            status = str(agent.run(instruction).get("exit_status", ""))
            error = ""
        except Exception as failure:  # noqa: BLE001 - the library's boundary: whatever ended it is a fact
            status, error = type(failure).__name__, f"{type(failure).__name__}: {failure}"
        return AgentFacts(
            stop_reason=_STOP_REASONS.get(status, StopReason.ERROR), turns=agent.n_calls, error=error
        )


async def _system(environment: BaseEnvironment) -> dict[str, str]:
    result = await environment.exec("uname -s; uname -r; uname -v; uname -m")
    lines = (result.stdout or "").splitlines()
    names = ("system", "release", "version", "machine")
    return dict(zip(names, lines, strict=True)) if len(lines) == len(names) else dict.fromkeys(names, "")
