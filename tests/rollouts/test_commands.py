"""One command: its output, its end, and nothing left of it."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.processes import identify, wait_until_gone
from pilotage.rollouts.commands import BoundedOutput, CommandResult, run_command

ENV = {"PATH": "/usr/bin:/bin"}


async def bash(command: str, timeout_s: float | None = 20.0, limit_bytes: int = 4096) -> CommandResult:
    return await run_command(
        ["bash", "-c", command], env=ENV, timeout_s=timeout_s, output_limit_bytes=limit_bytes
    )


def is_gone(pid_file: Path) -> bool:
    """Return whether the process has ended; a killed one takes a moment."""
    process = identify(int(pid_file.read_text()))
    return process is None or wait_until_gone([process], timeout_s=5.0) == []


async def test_output_and_exit_code_come_back() -> None:
    result = await bash("echo out; echo err >&2; exit 3")

    assert result == CommandResult(stdout="out\n", stderr="err\n", exit_code=3)


async def test_a_signal_shows_as_the_shell_would_report_it() -> None:
    assert (await bash("kill -TERM $$")).exit_code == 128 + 15


async def test_a_command_sees_exactly_the_given_environment() -> None:
    result = await run_command(["env"], env={"A": "1"}, timeout_s=20.0, output_limit_bytes=4096)

    assert result.stdout == "A=1\n"


async def test_input_is_empty() -> None:
    assert (await bash("cat; echo end")).stdout == "end\n"


async def test_a_timeout_kills_the_whole_process_group(tmp_path: Path) -> None:
    started = time.monotonic()

    result = await bash(f"sleep 600 & echo $! > {tmp_path}/pid; echo before; sleep 600", timeout_s=0.3)

    assert (result.exit_code, result.is_timed_out, result.stdout) == (124, True, "before\n")
    assert time.monotonic() - started < 5
    assert is_gone(tmp_path / "pid")


async def test_cancelling_kills_the_whole_process_group(tmp_path: Path) -> None:
    running = asyncio.create_task(bash(f"sleep 600 & echo $! > {tmp_path}/pid; sleep 600", timeout_s=None))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_gone(tmp_path / "pid")


async def test_cancelling_at_any_moment_of_the_start_leaves_nothing(tmp_path: Path) -> None:
    for attempt in range(20):
        pid_file = tmp_path / f"pid{attempt}"
        running = asyncio.create_task(bash(f"sleep 600 & echo $! > {pid_file}; sleep 600", timeout_s=None))
        await asyncio.sleep(attempt / 1000)  # from before the fork to after the shell runs

        running.cancel()

        with pytest.raises(asyncio.CancelledError):
            await running
        assert not pid_file.exists() or not pid_file.read_text() or is_gone(pid_file)


async def test_a_background_process_that_holds_the_output_is_not_waited_for() -> None:
    started = time.monotonic()

    result = await bash("sleep 30 & echo done; kill_me=$!; (sleep 1; kill $kill_me) > /dev/null 2>&1 &")

    assert result.stdout == "done\n"
    assert time.monotonic() - started < 1  # not 30


async def test_long_output_keeps_both_ends_in_bounded_memory() -> None:
    result = await bash("echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last")

    assert len(result.stdout) < 4200
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert "bytes omitted" in result.stdout


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(2, 40))
def test_bounded_output_keeps_a_prefix_and_a_suffix_of_what_was_fed(chunks: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for chunk in chunks:
        output.feed(chunk)
    whole, half = b"".join(chunks), limit // 2

    if len(whole) <= 2 * half:
        assert output.text() == whole.decode(errors="replace")
    else:
        note = f"\n[... {len(whole) - 2 * half} bytes omitted ...]\n".encode()
        assert output.text() == (whole[:half] + note + whole[-half:]).decode(errors="replace")
