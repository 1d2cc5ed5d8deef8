"""What the page of a run waits for: lines that the run wrote, and processes that may be killed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from benchmarks.bench_view import make_run

from pilotage.loops.summaries import SUMMARY_FILE
from pilotage.ops.view.index import Index
from pilotage.ops.view.library import Run
from pilotage.ops.view.workers import WorkerProcesses, Workers

POLICY = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "policy"
SECONDS_TO_END = 5.0
"""It takes 0.3 s, more where other programs hold the cores; a worker that is waited for takes longer."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    make_run(path, steps=2, groups=2, group_size=3, tokens=400, policy=POLICY)
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Run:
    shutil.copytree(made, tmp_path / "small")
    return Run(tmp_path / "small")


def no_executor() -> Executor:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()  # whoever uses it fails
    return executor


def test_a_run_with_summaries_is_listed_at_once_without_opening_a_rollout(run: Run, tmp_path: Path) -> None:
    index = Index(cache=tmp_path / "cache", workers=Workers(no_executor))
    listing = index.whole_run(run)
    assert listing.is_complete
    assert [summary.tools for summary in listing.summaries] == [("code_search",)] * 12
    assert not (tmp_path / "cache").exists()


async def test_a_rollout_without_a_line_or_with_the_line_of_another_file_is_read_itself(
    run: Run, tmp_path: Path
) -> None:
    folder = run.path / "rollouts" / "step-0001"
    lines = (folder / SUMMARY_FILE).read_bytes().splitlines(keepends=True)
    (folder / SUMMARY_FILE).write_bytes(b"".join(lines[1:]))
    first, second = (folder / f"step-0001-00-0{index}.json.gz" for index in (0, 1))
    second.write_bytes(first.read_bytes() + b"\0")
    workers = Workers(lambda: ThreadPoolExecutor(1))
    index = Index(cache=tmp_path / "cache", workers=workers)
    assert len(index.whole_run(run).summaries) == 10
    async with asyncio.TaskGroup() as group:
        following = group.create_task(index.follow())
        await asyncio.sleep(0)
        listing = await index.folder(run, "step-0001", wait_s=20.0)
        following.cancel()
    workers.close()
    assert listing.is_complete
    assert listing.summaries[0].tokens == listing.summaries[1].tokens > 0


def test_lines_that_come_while_a_run_is_looked_at_are_taken(run: Run, tmp_path: Path) -> None:
    folder = run.path / "rollouts" / "step-0002"
    whole = (folder / SUMMARY_FILE).read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 1
    (folder / SUMMARY_FILE).write_bytes(whole[:half])
    index = Index(cache=tmp_path / "cache", workers=Workers(no_executor))
    assert not index.whole_run(run).is_complete
    with (folder / SUMMARY_FILE).open("ab") as file:
        file.write(whole[half:])
    assert index.whole_run(run).is_complete


async def test_a_worker_that_was_killed_is_replaced_and_its_work_done_again() -> None:
    workers = WorkerProcesses(1)
    try:
        first = await workers.call(os.getpid)
        sleeping = asyncio.create_task(workers.call(time.sleep, 0.5))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        await sleeping
        assert await workers.call(os.getpid) != first
    finally:
        workers.close()


@pytest.mark.slow
def test_sigterm_ends_the_server_while_it_reads_without_waiting_for_its_workers(
    run: Run, tmp_path: Path
) -> None:
    for folder in run.folders():
        (run.path / "rollouts" / folder / SUMMARY_FILE).unlink()
    command = [sys.executable, "-m", "pilotage", "view", str(run.path.parent), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        assert httpx.get(f"{address}runs/small/rollouts", timeout=10).status_code == 200
        started = time.monotonic()
        server.terminate()
        assert server.wait(timeout=20) == 0
        assert time.monotonic() - started < SECONDS_TO_END
