"""A bubblewrap sandbox: private namespaces whose whole writable file system lives in memory.

A holder process owns the namespaces; every command enters them with nsenter, drops all capabilities and
runs under resource limits. Invariant: everything a command can write (the root is one size-limited tmpfs)
and every process it starts belongs to the holder's namespaces, so killing the namespace's first process
ends processes, terminals, tmux servers, mounts and files at once. If this process dies in any way the
holder goes with it: its input pipe closes, and the kernel sends its parent-death signal.

The root file system is built from parts: system directories and the Python installation read-only, minimal
/etc, everything else empty. Nothing of the user's files, the task directory or the environment variables of
this process is visible inside. Works as root and, where user namespaces are allowed, as any user.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pilotage.errors import ConfigError, PilotageError
from pilotage.processes import ProcessIdentity, identify, is_running, kill, wait_until_gone
from pilotage.rollouts.commands import started
from pilotage.rollouts.register import Holding, Register, current_process, private_directory

_NEEDED_PROGRAMS = ("bwrap", "nsenter", "setpriv", "bash")
_SYSTEM_DIRECTORIES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_HOST_FILES = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/terminfo",
)
_PACKAGE_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "_vendor", "_bundled", "vendored", "third_party", "pylib"}
)
"""Names of directories that hold published packages: installed, vendored by others, or as wheels."""
_PROGRAM_ROOTS = ("/usr", "/usr/lib", "/usr/share", "/usr/local", "/usr/local/lib")
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/ssl", "/etc/pki", "/etc/ca-certificates")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_HOLDER_PROGRAM = "echo ready; while read -r _; do :; done"
"""The namespace's first process: no signal from inside can end it, it reaps, and it leaves with its input."""
_READY_LINE = b"ready\n"
_START_TIMEOUT_S = 60.0
_REAP_TIMEOUT_S = 5.0


class SandboxError(PilotageError):
    """A sandbox could not be started, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox."""

    memory_mb: int = 4096
    """Address space of each process."""
    storage_mb: int = 2048
    """Everything written inside together; it lives in memory."""
    max_processes: int = 512
    """Processes of the sandbox; the kernel does not count those of the real root."""
    cpu_s: int = 3600
    """CPU seconds of each process."""

    def shell_prefix(self) -> str:
        """Return shell commands that set the limits on a shell and its children, hard."""
        return (
            f"ulimit -c 0; ulimit -v {self.memory_mb * 1024}; ulimit -f {self.storage_mb * 1024};"
            f" ulimit -t {self.cpu_s}; ulimit -u {self.max_processes};"
        )


def _entry(directories: Sequence[str]) -> str:
    """Return shell commands that go to the working directory, the shell's second argument.

    Of `directories`, those that a command before has removed are made again, empty: a policy that deletes its
    workspace, or the place of the reward, is scored, and not taken for a fault of the machine.
    """
    paths = " ".join(map(shlex.quote, directories))
    again = (
        f'for d in {paths}; do [ -d "$d" ] || {{ rm -f "$d"; mkdir -p "$d"; }}; done 2> /dev/null; unset d;'
    )
    return f'{again} cd -- "$2" || exit 1; unset OLDPWD;'


def check_programs() -> None:
    """Raise ConfigError unless everything the sandbox needs is installed and allowed here."""
    missing = [name for name in _NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"the sandbox needs {', '.join(missing)}: install bubblewrap and util-linux"
            " (apt-get install bubblewrap util-linux), or set unsandboxed = true to run"
            " model-written commands without protection"
        )
    if complaint := _probe():
        raise ConfigError(
            f"bubblewrap cannot make a sandbox here: {complaint}; allow user namespaces"
            " (sysctl kernel.unprivileged_userns_clone=1), or set unsandboxed = true to run"
            " model-written commands without protection"
        )


@cache
def _probe() -> str:
    """Return what bubblewrap complains about when it makes the smallest sandbox; empty where it works."""
    argv = [
        *_namespace_arguments(has_network=False),
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    done = subprocess.run(
        [*argv, "true"], capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False
    )
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


@cache
def _can_size_tmpfs() -> bool:
    """Return whether this bubblewrap (0.7 or newer) can limit the size of a tmpfs."""
    done = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return "--size" in done.stdout + done.stderr


def _namespace_arguments(*, has_network: bool) -> list[str]:
    # The real root also gets a user namespace: the capabilities it keeps are worth nothing outside.
    return [
        *("bwrap", "--unshare-user", "--uid", "0", "--gid", "0"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if has_network else ("--unshare-net",)),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session"),
    ]


@cache
def _system_directories() -> dict[str, str]:
    """Return directory -> what is mounted there. Where this machine has a link into /usr, that is mounted
    once more: a link could be removed by a policy, and then no verifier would run.
    """
    return {path: str(Path(path).resolve()) for path in _SYSTEM_DIRECTORIES if Path(path).is_dir()}


@cache
def _interpreter_arguments() -> tuple[str, ...]:
    """Bind the Python installation, and hide every directory of this machine that holds published packages.

    Tasks are made of such packages: a second copy of a task's package would give the answer away.
    """
    prefix = Path(sys.base_prefix).resolve()
    arguments: list[str] = []
    if not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    roots = {prefix, prefix / "lib", *map(Path, _PROGRAM_ROOTS)}
    for packages in package_directories(roots):
        again = [
            directory + packages.removeprefix(source)
            for directory, source in _system_directories().items()
            if Path(packages).is_relative_to(source)
        ]
        for path in dict.fromkeys([packages, *again]):
            arguments += ["--tmpfs", path, "--remount-ro", path]
    return tuple(arguments)


def package_directories(roots: set[Path]) -> list[str]:
    """Return the directories to hide below `roots`.

    A program that brings packages of its own is hidden whole, since they need not all be where their names
    say so; of Python itself, of node and of the roots, only the directories that hold packages.
    """
    found: set[Path] = set()
    for root in sorted(roots):
        if any(root != other and root.is_relative_to(other) for other in roots):
            continue  # walked with the other
        for folder, directories, _ in os.walk(root):
            holders = [Path(folder, name) for name in directories if name in _PACKAGE_DIRECTORIES]
            found |= {_program_of(holder, roots) for holder in holders}
            directories[:] = [name for name in directories if name not in _PACKAGE_DIRECTORIES]
    return sorted(str(path) for path in found if not found & set(path.parents))


def _program_of(holder: Path, roots: set[Path]) -> Path:
    """Return the directory directly below a root that a package directory belongs to, or itself."""
    program = next(path for path in (holder, *holder.parents) if path.parent in roots)
    is_kept = program in roots or program.name.startswith(("python", "node_modules"))
    return holder if is_kept else program


@cache
def interpreter_path() -> str:
    """Return the PATH of commands: the Python installation that is bound inside, then the system's."""
    directory = str(Path(sys.base_prefix).resolve() / "bin")
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return system if directory == "/usr/bin" else f"{directory}:{system}"


@cache
def _etc_directory(register_directory: Path) -> Path:
    """Write the minimal /etc once per register."""
    directory = private_directory(register_directory / "etc")
    for name, text in _ETC.items():
        partial = directory / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(directory / name)
    return directory


def holder_arguments(
    *,
    etc: Path,
    limits: SandboxLimits,
    directories: Sequence[str],
    has_network: bool,
    shown: Mapping[str, str],
) -> list[str]:
    """Return the arguments of bubblewrap, without the descriptor for its report and the command."""
    sized = ["--size", str(limits.storage_mb * 2**20)] if _can_size_tmpfs() else []
    arguments = [*_namespace_arguments(has_network=has_network), *sized, "--tmpfs", "/"]
    for directory, source in {"/usr": "/usr", **_system_directories()}.items():
        arguments += ["--ro-bind", source, directory]
    arguments += _interpreter_arguments()
    for name in _ETC:
        arguments += ["--ro-bind", str(etc / name), f"/etc/{name}"]
    for path_text in _HOST_FILES + (_NETWORK_FILES if has_network else ()):
        arguments += ["--ro-bind-try", path_text, path_text]
    arguments += ["--proc", "/proc", "--dev", "/dev", *sized, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for directory in directories:
        arguments += ["--dir", directory]
    for inside, here in shown.items():
        arguments += ["--ro-bind", here, inside]
    return arguments


class BubblewrapSandbox:
    """One sandbox; used once: start, any number of commands, stop."""

    def __init__(
        self,
        *,
        register: Register,
        limits: SandboxLimits,
        directories: Sequence[str],
        has_network: bool,
        shown: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a sandbox that is not started.

        Args:
            directories: made inside, empty.
            shown: directory inside -> directory of this machine that is seen there, read-only.
        """
        self._shown = shown
        self._register = register
        self._limits = limits
        self._directories = directories
        self._entry = _entry(directories)
        self._has_network = has_network
        self._id = f"sandbox-{uuid.uuid4().hex}"
        self._holder: asyncio.subprocess.Process | None = None
        self._init: ProcessIdentity | None = None

    @property
    def root(self) -> Path:
        """The sandbox's root directory as this process reaches it, for transfers that follow no links."""
        return Path(f"/proc/{self._first_process().pid}/root")

    async def start(self) -> None:
        """Make the namespaces and wait until their file system is whole.

        Raises:
            SandboxError: bubblewrap failed; the message is its own.
        """
        etc = _etc_directory(self._register.directory)
        read_end, write_end = os.pipe()
        try:
            try:
                await started(self._start_holder(etc, write_end), undo=lambda _: self.stop())
            finally:
                os.close(write_end)
            assert self._holder is not None
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._await_ready(self._holder, read_end)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        finally:
            os.close(read_end)

    async def _start_holder(self, etc: Path, info_fd: int) -> None:
        self._holder = await asyncio.create_subprocess_exec(
            *holder_arguments(
                etc=etc,
                limits=self._limits,
                directories=self._directories,
                has_network=self._has_network,
                shown=self._shown,
            ),
            *("--info-fd", str(info_fd), "--as-pid-1", "--", "bash", "-c", _HOLDER_PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": interpreter_path()},
            pass_fds=(info_fd,),
            start_new_session=True,
        )

    async def _await_ready(self, holder: asyncio.subprocess.Process, info_fd: int) -> None:
        assert holder.stdout is not None
        assert holder.stderr is not None
        # bubblewrap reports the process id before the mounts exist; the line from inside comes after.
        line = await holder.stdout.readline()
        if line != _READY_LINE:
            complaint = (await holder.stderr.read()).decode(errors="replace").strip()
            raise SandboxError(f"bubblewrap could not make the sandbox: {complaint or 'it ended at once'}")
        report = json.loads(os.read(info_fd, 65536))
        self._init = identify(report["child-pid"])
        outer = identify(holder.pid)
        if self._init is None or outer is None:
            raise SandboxError("the sandbox ended while it started")
        self._register.write(Holding(id=self._id, owner=current_process(), processes=(self._init, outer)))

    def argv(self, command: str, *, cwd: str) -> list[str]:
        """Return the program that runs a shell command inside.

        It drops every capability before the command starts: inside its user namespace the entering process
        has them all, enough to make a read-only mount writable.
        """
        pid = self._first_process().pid
        return [
            *("nsenter", "--target", str(pid), "--user", "--preserve-credentials"),
            *("--mount", "--pid", "--ipc", "--uts", *(() if self._has_network else ("--net",))),
            f"--wd=/proc/{pid}/root/",
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *("bash", "-c", f'{self._limits.shell_prefix()} {self._entry} eval "$1"', "bash", command, cwd),
        ]

    def environment(self) -> Mapping[str, str]:
        """Return the variables that commands start from; nothing comes from this process."""
        return {
            "PATH": interpreter_path(),
            "HOME": "/root",
            "USER": "root",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "TMUX_TMPDIR": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def check_running(self) -> None:
        """Raise SandboxError where something ended the sandbox from outside."""
        if not is_running(self._first_process()):
            raise SandboxError("the sandbox has died; something on this machine killed it")

    async def stop(self) -> None:
        """End everything inside; may be called at any time and more than once."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        # Only the child is killed. The outer process must live to reap it, since the first process of a
        # container often reaps nothing; and a child that has not armed its death signal would survive the
        # outer one. Where the child is not known yet, the end of its input makes it leave by itself.
        if self._init is not None:
            kill(self._init)
        assert holder.stdin is not None
        holder.stdin.close()
        try:
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await holder.wait()
        except TimeoutError:
            _signal(holder)
            await holder.wait()
        if self._init is not None:
            await _until_gone(self._init)
        holder._transport.close()  # pyright: ignore  # the pipes; asyncio offers no other way
        self._register.remove(self._id)

    def _first_process(self) -> ProcessIdentity:
        if self._init is None or self._holder is None:
            raise SandboxError("the sandbox is not running; it was stopped, or never started")
        return self._init


def _signal(holder: asyncio.subprocess.Process) -> None:
    # Not `holder.kill()`, which reaps the process behind the back of asyncio.
    if holder.returncode is None:
        os.kill(holder.pid, signal.SIGKILL)


async def _until_gone(process: ProcessIdentity) -> None:
    for _ in range(400):
        if identify(process.pid) != process:
            return
        await asyncio.sleep(0.002)
    if wait_until_gone([process], timeout_s=5.0):
        raise SandboxError(f"process {process.pid} of a sandbox survives SIGKILL")
