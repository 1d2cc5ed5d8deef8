"""What a command inside a sandbox can see, reach and use up; and that nothing outlives it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from pilotage.processes import identify
from pilotage.rollouts.commands import CommandResult, run_command
from pilotage.rollouts.register import Register
from pilotage.rollouts.sandbox import BubblewrapSandbox, SandboxError, SandboxLimits

LIMITS = SandboxLimits(memory_mb=512, storage_mb=16, max_processes=64, cpu_s=60)


class Box:
    """A started sandbox and a way to run commands in it."""

    def __init__(self, sandbox: BubblewrapSandbox, register: Register) -> None:
        self.sandbox = sandbox
        self.register = register

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        return await run_command(
            self.sandbox.argv(command, cwd="/work"),
            env=self.sandbox.environment(),
            timeout_s=timeout_s,
            output_limit_bytes=65536,
        )

    async def out(self, command: str) -> str:
        result = await self.run(command)
        assert result.exit_code == 0, result
        return result.stdout.strip()


def make(register: Register, *, has_network: bool = False) -> BubblewrapSandbox:
    return BubblewrapSandbox(
        register=register, limits=LIMITS, directories=("/work", "/tmp", "/root"), has_network=has_network
    )


@pytest.fixture
async def box(tmp_path: Path) -> AsyncGenerator[Box]:
    register = Register(tmp_path / "register")
    sandbox = make(register)
    await sandbox.start()
    yield Box(sandbox, register)
    await sandbox.stop()


async def test_commands_run_in_the_working_directory_with_python(box: Box) -> None:
    assert await box.out("pwd; python3 -c 'print(6 * 7)'") == "/work\n42"


@pytest.mark.parametrize(
    "command",
    ["rm -rf /work", "rm -rf /work; touch /work", "rm -rf /work; ln -s /nowhere /work", "mv /work /tmp/gone"],
)
async def test_a_working_directory_that_a_command_removed_is_there_again_for_the_next(
    box: Box, command: str
) -> None:
    await box.run(f"touch /work/file; cd /; {command}")
    assert await box.out("pwd -P; ls -A; echo ${OLDPWD-unset}") == "/work\nunset"


async def test_a_working_directory_that_never_was_is_an_error(box: Box) -> None:
    result = await run_command(
        box.sandbox.argv("echo ran", cwd="/elsewhere"),
        env=box.sandbox.environment(),
        timeout_s=30,
        output_limit_bytes=1000,
    )
    assert (result.exit_code, result.stdout) == (1, "")
    assert "/elsewhere: No such file or directory" in result.stderr


async def test_nothing_of_this_process_shows(box: Box, tmp_path: Path) -> None:
    os.environ["PILOTAGE_TEST_SECRET"] = "hunter2"
    (tmp_path / "file").write_text("x")
    try:
        assert "hunter2" not in await box.out("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true")
    finally:
        del os.environ["PILOTAGE_TEST_SECRET"]
    assert (await box.run(f"ls {tmp_path}")).exit_code != 0
    assert (await box.run("cat /etc/shadow")).exit_code != 0
    assert "work" in await box.out("ls /")
    assert await box.out("ls -A /work /tmp /root | grep -v ':$' | grep -v '^\\.pyenv$'; true") == ""


async def test_the_system_cannot_be_written_even_by_its_root(box: Box) -> None:
    assert await box.out("id -u; grep CapEff /proc/self/status") == "0\nCapEff:\t0000000000000000"
    assert (await box.run("touch /usr/x")).exit_code != 0
    assert (await box.run("mount -o remount,rw /usr && touch /usr/x")).exit_code != 0
    assert (await box.run("unshare -Ur mount -o remount,rw /usr")).exit_code != 0


async def test_what_programs_need_to_start_cannot_be_removed_or_replaced(box: Box) -> None:
    for path in ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/dev", "/proc", "/etc/passwd"):
        await box.run(f"rm -rf {path} {path}/*; mv {path} /gone; ln -sfn /nowhere {path}")
    await box.run("rm -f /dev/null /dev/fd; touch /dev/null /dev/fd; rm -rf /* 2>&1")
    script = "bash -c 'cat <(echo whole) 2>/dev/null' && python3 -c 'import multiprocessing as m; m.Lock()'"
    assert await box.out(f"/bin/sh -c true && {script}") == "whole"


async def test_there_is_no_network(box: Box) -> None:
    code = "import socket; print([name for _, name in socket.if_nameindex()])"
    assert await box.out(f'python3 -c "{code}"') == "['lo']"


async def test_only_its_own_processes_show(box: Box) -> None:
    assert str(os.getpid()) not in (await box.out("ls /proc")).split()


async def test_installed_packages_are_hidden(box: Box) -> None:
    # A second copy of a task's package would give its bug away.
    named = r"\( -name site-packages -o -name dist-packages \)"
    listing = await box.out(f"find / -path /proc -prune -o {named} -exec ls -A {{}} \\; 2>/dev/null; true")
    assert listing == ""
    assert sys.base_prefix in await box.out("python3 -c 'import sys; print(sys.base_prefix)'")


async def test_storage_is_limited_altogether(box: Box) -> None:
    assert (await box.run("head -c 10M /dev/zero > /work/a")).exit_code == 0
    assert (await box.run("head -c 10M /dev/zero > /tmp/b")).exit_code != 0  # 16 MB in all


async def test_memory_of_a_process_is_limited(box: Box) -> None:
    result = await box.run("python3 -c 'bytearray(2**30)'")

    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


async def test_limits_cannot_be_raised(box: Box) -> None:
    assert (await box.run("ulimit -v unlimited")).exit_code != 0


async def test_processes_that_left_their_session_end_with_the_sandbox(tmp_path: Path) -> None:
    box = Box(make(Register(tmp_path / "register")), Register(tmp_path / "register"))
    await box.sandbox.start()
    await box.run("setsid sleep 600 > /dev/null 2>&1 &")
    [holding] = box.register.holdings()

    await box.sandbox.stop()

    assert [identify(process.pid) for process in holding.processes] == [None, None]
    assert box.register.holdings() == []


async def test_a_tmux_server_ends_with_the_sandbox(tmp_path: Path) -> None:
    box = Box(make(Register(tmp_path / "register")), Register(tmp_path / "register"))
    await box.sandbox.start()
    await box.out("tmux new-session -d -s agent 'sleep 600'; tmux list-sessions | grep -c agent")
    namespace = os.readlink(f"/proc/{box.register.holdings()[0].processes[0].pid}/ns/pid")

    await box.sandbox.stop()

    assert processes_in(namespace) == []


def processes_in(namespace: str) -> list[str]:
    """Return the ids of the processes in a pid namespace."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                found.append(entry.name)
    return found


def holders_of(register: Register) -> list[str]:
    """Return the ids of the processes whose command line names the register: bubblewrap's."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(register.directory).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found


async def test_a_sandbox_that_was_killed_from_outside_says_so(box: Box) -> None:
    [holding] = box.register.holdings()
    os.kill(holding.processes[0].pid, 9)
    await asyncio.sleep(0.2)

    with pytest.raises(SandboxError, match="has died"):
        box.sandbox.check_running()


async def test_stopping_twice_and_before_starting_is_harmless(tmp_path: Path) -> None:
    sandbox = make(Register(tmp_path / "register"))
    await sandbox.stop()
    await sandbox.start()
    await sandbox.stop()
    await sandbox.stop()

    with pytest.raises(SandboxError, match="not running"):
        sandbox.argv("true", cwd="/")


async def test_cancelling_a_start_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    register = Register(tmp_path / "register")
    for attempt in range(12):
        sandbox = make(register)
        starting = asyncio.create_task(sandbox.start())
        await asyncio.sleep(attempt * 0.003)
        starting.cancel()
        await asyncio.wait({starting})
        await sandbox.stop()

    assert register.holdings() == []
    assert holders_of(register) == []


def test_the_sandbox_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from pilotage.rollouts.register import Register
from tests.rollouts.test_sandbox import Box, make

async def main() -> None:
    register = Register(Path({str(tmp_path / "register")!r}))
    box = Box(make(register), register)
    await box.sandbox.start()
    await box.run("setsid sleep 600 > /dev/null 2>&1 &")
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    register = Register(tmp_path / "register")
    [holding] = register.holdings()
    process.kill()
    process.wait()
    process.stdout.close()

    assert register.sweep().holdings == 1

    assert [identify(found.pid) for found in holding.processes] == [None, None]
    assert register.holdings() == []
