"""`HostEnvironment`: a Harbor environment on this machine, in a sandbox, without a container engine.

Usable by Harbor itself: `--env pilotage.rollouts:HostEnvironment`. It runs tasks with the programs and the
Python of this machine: loose files of `environment/` become the workdir, a Dockerfile is not built.
Invariant: after `stop`, and after the death of this process, nothing of a trial is left running.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME, parse_dockerfile_workdir
from harbor.models.task.config import NetworkMode

from pilotage.errors import ConfigError
from pilotage.rollouts import transfer
from pilotage.rollouts.commands import run_command
from pilotage.rollouts.plain import PlainDirectory
from pilotage.rollouts.register import Register
from pilotage.rollouts.sandbox import BubblewrapSandbox, SandboxLimits, check_programs

_log = logging.getLogger(__name__)

DEFAULT_WORKDIR = "/workspace"
"""The same for every rollout, so that nothing in a prompt tells rollouts apart."""
_DIRECTORIES = (
    *("/tmp", "/root", "/run", "/var/tmp", "/opt", "/app", DEFAULT_WORKDIR),
    *("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution"),
    *("/installed-agent", "/runtime"),
)
_OUTPUT_LIMIT_BYTES = 2**20
_MTIME = 1_577_836_800.0
"""2020-01-01: every file of a task is equally old."""
_HARBOR_ARGUMENTS = frozenset(inspect.signature(BaseEnvironment.__init__).parameters)
_transfers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pilotage-transfer")
"""Apart from the event loop's own threads: those may all be waiting for a command of an agent's tool."""


class _Sandbox(Protocol):
    """What `BubblewrapSandbox` and `PlainDirectory` share."""

    @property
    def root(self) -> Path: ...
    async def start(self) -> None: ...
    def argv(self, command: str, *, cwd: str) -> list[str]: ...
    def environment(self) -> Any: ...
    def check_running(self) -> None: ...
    async def stop(self) -> None: ...


class HostEnvironment(BaseEnvironment):
    """Runs a trial's commands in a private sandbox on this machine."""

    def __init__(
        self,
        *args: Any,
        unsandboxed: bool = False,
        register_directory: str | None = None,
        withheld_variables: Sequence[str] = (),
        shown_directories: Mapping[str, str] = MappingProxyType({}),
        **harbor: Any,
    ) -> None:
        """Take Harbor's arguments, and as `--environment-kwarg` options:

        unsandboxed: run commands as plain processes of this user, without any protection.
        register_directory: where sandboxes are registered for the sweep; default: private to this user.
        withheld_variables: names that an agent's environment may hold but its commands must not see.
        shown_directories: directory inside -> directory of this machine that is seen there, read-only: for
            agents that would otherwise install themselves over a network which a sandbox has not.

        Raises:
            ConfigError: bubblewrap is missing or not allowed, an option is unknown, or a directory to show is
                missing, or cannot be shown because there is no sandbox.
        """
        if unknown := sorted(set(harbor) - _HARBOR_ARGUMENTS):
            raise ConfigError(
                f"HostEnvironment has no option {', '.join(unknown)}; it has: unsandboxed, shown_directories"
            )
        super().__init__(*args, **harbor)
        if not unsandboxed:
            check_programs()
        self._withheld = frozenset(withheld_variables)
        _check_shown(shown_directories, unsandboxed)
        self._shown = shown_directories
        self._sandbox = self._make_sandbox(unsandboxed, register_directory)

    def _make_sandbox(self, unsandboxed: bool, register_directory: str | None) -> _Sandbox:
        register = Register(Path(register_directory) if register_directory else None)
        directories = (*_DIRECTORIES, self._workdir)
        if unsandboxed:
            return PlainDirectory(register=register, directories=directories)
        defaults = SandboxLimits()
        limits = SandboxLimits(
            memory_mb=self._effective_memory_mb or defaults.memory_mb,
            storage_mb=self._effective_storage_mb or defaults.storage_mb,
        )
        return BubblewrapSandbox(
            register=register,
            limits=limits,
            directories=directories,
            has_network=self._asks_for_network,
            shown=self._shown,
        )

    @property
    def _asks_for_network(self) -> bool:
        # Harbor's default is public; a sandbox opens the network only for a task that says so itself.
        is_declared = "network_mode" in self.task_env_config.model_fields_set
        return is_declared and self.network_policy.network_mode == NetworkMode.PUBLIC

    @functools.cached_property
    def _workdir(self) -> str:
        dockerfile = self.environment_dir / DOCKERFILE_NAME
        return self.task_env_config.workdir or parse_dockerfile_workdir(dockerfile) or DEFAULT_WORKDIR

    @staticmethod
    @override
    def type() -> str:
        return "host"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        if not self.environment_dir.is_dir():
            raise FileNotFoundError(f"{self.environment_dir}: a Harbor task needs an environment/ directory")

    @override
    async def start(self, force_build: bool) -> None:
        await self._sandbox.start()
        if not self._enable_environment_dir_upload:
            return
        if (self.environment_dir / DOCKERFILE_NAME).exists():
            _log.debug("%s: HostEnvironment does not build the Dockerfile", self.environment_name)
        await _in_thread(
            lambda: transfer.write_tree(
                self._sandbox.root,
                self._workdir,
                self.environment_dir,
                mtime=_MTIME,
                skipped=frozenset({DOCKERFILE_NAME, COMPOSE_FILE_NAME}),
            )
        )

    @override
    async def stop(self, delete: bool) -> None:
        await self._sandbox.stop()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command; `user` is ignored, there is only one."""
        variables = {
            name: value for name, value in (self._merge_env(env) or {}).items() if name not in self._withheld
        }
        result = await run_command(
            self._sandbox.argv(command, cwd=cwd or self._workdir),
            env={**self._sandbox.environment(), **variables},
            timeout_s=timeout_sec,
            output_limit_bytes=_OUTPUT_LIMIT_BYTES,
        )
        if result.exit_code != 0:
            self._sandbox.check_running()  # otherwise the agent would be blamed
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await _in_thread(lambda: transfer.write_file(self._sandbox.root, target_path, Path(source_path)))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await _in_thread(lambda: transfer.write_tree(self._sandbox.root, target_dir, Path(source_dir)))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await _in_thread(lambda: transfer.read_file(self._sandbox.root, source_path, Path(target_path)))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await _in_thread(lambda: transfer.read_tree(self._sandbox.root, source_dir, Path(target_dir)))

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return transfer.is_directory(self._sandbox.root, path)


def _check_shown(shown: Mapping[str, str], unsandboxed: bool) -> None:
    if shown and unsandboxed:
        raise ConfigError("shown_directories needs the sandbox: leave out unsandboxed, or the directories")
    for inside, here in shown.items():
        if not Path(inside).is_absolute() or not Path(here).is_dir():
            raise ConfigError(f"shown_directories: {inside} must be absolute, and {here} a directory here")


async def _in_thread[T](function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_transfers, function)
