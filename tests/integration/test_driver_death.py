"""A job never outlives its driver: SIGKILL and its lease, SIGTERM, and the startup timeout."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import uvicorn
from tests.service.rig import PREFIX, Rig, rig

from pilotage.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 6.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.asynccontextmanager
async def on_a_socket(service: Rig) -> AsyncGenerator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = EmbeddedServer(uvicorn.Config(service.app, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def start_driver(url: str, directory: Path, *numbers: float) -> asyncio.subprocess.Process:
    directory.mkdir()  # noqa: ASYNC240 - once
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.idle_driver",
        url,
        str(directory),
        *map(str, numbers),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


async def first_line(driver: asyncio.subprocess.Process) -> str:
    assert driver.stdout is not None
    return (await driver.stdout.readline()).decode().strip()


async def free_gpus(service: Rig) -> int:
    return (await service.http.get(f"{PREFIX}/capacity")).json()["available_gpus"]


def job_of(directory: Path) -> str:
    return (directory / "job_id").read_text().strip()


async def test_a_killed_drivers_job_is_cancelled_when_its_lease_runs_out(tmp_path: Path) -> None:
    async with rig(tmp_path) as service, on_a_socket(service) as url:
        driver = await start_driver(url, tmp_path / "run", LEASE_S, 60, 1)
        assert await first_line(driver) == "running"
        await asyncio.sleep(1.5 * LEASE_S)  # the lease is renewed, so that the job outlives its first length
        assert await free_gpus(service) == 6
        driver.send_signal(signal.SIGKILL)
        await driver.wait()
        killed_at = time.monotonic()
        assert await service.until(job_of(tmp_path / "run"), timeout_s=60) == "cancelled"
        # The last renewal was at most a third of the lease before; the rest is the service's own time.
        assert time.monotonic() - killed_at < LEASE_S + 10
        assert await free_gpus(service) == 8


async def test_a_driver_that_is_told_to_end_frees_its_job_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as service, on_a_socket(service) as url:
        driver = await start_driver(url, tmp_path / "run", 600, 60, 1)
        assert await first_line(driver) == "running"
        driver.send_signal(signal.SIGTERM)
        assert await driver.wait() == 130
        # Nothing is waited for: when the driver is gone, the GPUs are free.
        assert await free_gpus(service) == 8
        assert await service.until(job_of(tmp_path / "run")) == "cancelled"


async def test_a_job_that_gets_no_gpus_is_cancelled_at_the_startup_timeout(tmp_path: Path) -> None:
    async with rig(tmp_path, capacity=8) as service, on_a_socket(service) as url:
        await service.running()
        driver = await start_driver(url, tmp_path / "run", 60, 1.0, 4)
        line = await first_line(driver)
        assert "was still pending after 1 s" in line
        assert await driver.wait() == 8
        job = (await service.http.get(f"{PREFIX}/{job_of(tmp_path / 'run')}")).json()
        assert job["status"] == "cancelled"
        capacity = (await service.http.get(f"{PREFIX}/capacity")).json()
        assert (capacity["in_use_gpus"], capacity["pending_gpus"]) == (2, 0)
