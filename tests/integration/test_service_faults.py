"""Whatever the network or the service's own death does to calls and replies, the weights end bit for bit as
in a clean run, and every gradient is applied once.
"""

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.client.faults import Fault, FaultyTransport
from tests.integration.service_run import LOSS, digest_of_weights, run
from tests.service.rig import LOCAL, Rig, rig

from pilotage.client import Connection, CoreEngine, Http, JobPlan, Jobs, Patience, open_engine
from pilotage.client.remote_checkpoint import RemoteCheckpoint
from pilotage.types import AdamParams, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "recipes" / "demo" / "policy"
PILOTAGE = str(Path(sys.executable).with_name("pilotage"))
SPOILT = [fault for fault in Fault if fault is not Fault.NONE]
STOPS = (2,)
"""Completions end by their length, or at this id."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A running job, and the checkpoint that every run on it starts from."""

    service: Rig
    job_id: str
    directory: Path

    @asynccontextmanager
    async def engine(self, *faults: Fault) -> AsyncGenerator[tuple[CoreEngine, FaultyTransport]]:
        """Attach a driver whose network spoils its first calls."""
        transport = FaultyTransport(self.service.app, faults, spares=lambda r: "/lease" in r.url.path)
        connection = Connection(origin="http://localhost", database="DB", schema="PUBLIC")
        patience = Patience(total_s=30, first_s=0.001, longest_s=0.01)
        async with Http(connection, patience=patience, transport=transport) as http:
            capabilities = await Jobs(http).capabilities()
            assert capabilities is not None
            transport.calls.clear()
            async with CoreEngine.attach(
                http, self.job_id, capabilities=capabilities, stop_token_ids=STOPS, lease_s=None
            ) as engine:
                yield engine, transport

    async def digest(self, name: str, *faults: Fault) -> tuple[str, int]:
        """Run from the first checkpoint; returns the final weights' digest, and how many calls it took."""
        async with self.engine() as (engine, _):
            await engine.load(self.directory / "start")
            await engine.publish()
        async with self.engine(*faults) as (engine, transport):
            await run(engine, self.directory / name, num_steps=1)
        saved = RemoteCheckpoint.read(self.directory / name).record.checkpoint_id
        files = self.directory / "jobs" / self.job_id / "checkpoints" / saved
        digest = digest_of_weights(files)
        shutil.rmtree(files)
        return digest, len(transport.calls)


@asynccontextmanager
async def bench(directory: Path) -> AsyncGenerator[Bench]:
    (directory / "models").mkdir()
    shutil.copytree(POLICY, directory / "models" / "policy")
    async with rig(directory, command=LOCAL) as service:
        service.http.headers["x-unused"] = "1"
        job_id = await service.create(**{"x-pilotage": {"engine": {"stop_token_ids": list(STOPS)}}})
        assert await service.until(job_id, "running", timeout_s=300) == "running"
        found = Bench(service=service, job_id=job_id, directory=directory)
        async with found.engine() as (engine, _):
            await engine.save(directory / "start")
        yield found


async def test_every_call_and_every_reply_may_be_spoilt_once_in_every_way(tmp_path: Path) -> None:
    async with bench(tmp_path) as found:
        clean, num_calls = await found.digest("clean")
        again, _ = await found.digest("again")
        assert again == clean
        wrong: list[str] = []
        for position in range(num_calls):
            for fault in SPOILT:
                faults = [Fault.NONE] * position + [fault]
                digest, _ = await found.digest(f"{fault.name}-{position}", *faults)
                if digest != clean:
                    wrong.append(f"{fault} at call {position}")
        assert wrong == []
        assert num_calls >= 9  # state, three samples, two gradients, step, publish, save


async def test_a_run_in_which_half_of_all_calls_are_spoilt_ends_with_the_same_weights(tmp_path: Path) -> None:
    chance = random.Random(0)
    async with bench(tmp_path) as found:
        clean, _ = await found.digest("clean")
        for attempt in range(10):
            faults = [chance.choice([*SPOILT, *[Fault.NONE] * len(SPOILT)]) for _ in range(40)]
            digest, _ = await found.digest(f"attempt-{attempt}", *faults)
            assert digest == clean


# --- the service itself is killed ---


def start_service(data: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [PILOTAGE, "serve", "--no-auth", "--models", str(POLICY.parent)]
    return subprocess.Popen(
        [*command, "--data", str(data), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=(data.parent / "service.log").open("ab"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def plan(directory: Path) -> JobPlan:
    from pilotage.wire.jobs import CreateJobBody

    body = CreateJobBody.model_validate(
        {
            "sub_job_configs": [
                {
                    "job_type": "training",
                    "model_name": "policy",
                    "training_config": {
                        "optimizer": {"lr": 1e-3}, "max_seq_len": 64, "train_batch_size": 3, "n_gpus": 1,
                    },
                },
                {
                    "job_type": "sampling",
                    "model_name": "policy",
                    "inference_config": {"max_seq_len": 64, "n_gpus": 1},
                },
            ],
            "x-pilotage": {"lease_s": 120, "engine": {"stop_token_ids": list(STOPS)}},
        }
    )  # fmt: skip
    return JobPlan(
        body=body,
        loss=LOSS,
        adam=AdamParams(learning_rate=1e-3),
        sampling=SamplingParams(),
        startup_timeout_s=300,
        run_directory=directory,
        patience=Patience(total_s=120, first_s=0.02, longest_s=0.5),
    )


async def final_digest(data: Path, port: int, directory: Path, *, num_steps: int) -> str:
    directory.mkdir()  # noqa: ASYNC240 - once
    async with open_engine(Connection(origin=f"http://127.0.0.1:{port}"), plan(directory)) as engine:
        assert isinstance(engine, CoreEngine)
        await run(engine, directory / "end", num_steps=num_steps)
    saved = RemoteCheckpoint.read(directory / "end")
    return digest_of_weights(data / "jobs" / saved.job_id / "checkpoints" / saved.record.checkpoint_id)


async def test_a_service_killed_at_random_moments_and_restarted_loses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    num_kills, chance = int(os.environ.get("PILOTAGE_SERVICE_KILLS", "5")), random.Random(1)
    data, port = tmp_path / "service", free_port()
    service = start_service(data, port)
    try:
        await _until_up(port)
        clean = await final_digest(data, port, tmp_path / "clean", num_steps=40)
        running = asyncio.create_task(final_digest(data, port, tmp_path / "killed", num_steps=40))
        kills = 0
        while not running.done() and kills < num_kills:
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            service.send_signal(signal.SIGKILL)
            service.wait()
            kills += 1
            service = start_service(data, port)
            await _until_up(port)
        assert kills >= 2  # on a busy machine the run may end before the last of them
        assert await running == clean
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/api/v2/databases/x/schemas/y/cortex-training/capacity"
            assert (await http.get(url)).json()["in_use_gpus"] == 0
    finally:
        service.terminate()
        service.wait(30)


async def _until_up(port: int) -> None:
    deadline = time.monotonic() + 60
    async with httpx.AsyncClient() as http:
        while time.monotonic() < deadline:
            try:
                await http.get(f"http://127.0.0.1:{port}/health")
                return
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
    raise AssertionError("the service did not come up again")
