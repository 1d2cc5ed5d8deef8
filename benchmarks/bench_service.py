"""The training service under load: 512 samples of 64 sessions in flight, with the demo's tiny policy.

Starts `pilotage serve --no-auth` on a free port and one job with the local engine; this process is the
client.
Each call is a `core/sample` of a prompt of its own, held by long poll. The engine's share of a call is what
the reply's `server-timing` header states: from the moment the engine process starts to work on the call until
the completion is there, its queue for a place in the batch included. The service's own time is what the
header's total, from the front's first sight of a request to its reply, has beyond that: the front, the engine
process's HTTP and the socket between them. What is left of the call's time, as the client sees it, is this
client's own queue of 512 tasks and the socket to the front. Each session has an HTTP client of its own,
because httpx looks at every connection of a pool for every request. Calls that were begun before the end are
finished and counted.

    python benchmarks/bench_service.py 600
"""

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from pilotage.types import SamplingParams
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.samples import pack_sample_request, unpack_completion

IN_FLIGHT = 512
SESSIONS = 64
PROMPT_TOKENS, MAX_TOKENS = 64, 16
_PREFIX = "/api/v2/databases/db/schemas/public/cortex-training"
_MODELS = Path(__file__).resolve().parents[1] / "recipes" / "demo"
_WORK = re.compile(r"work;dur=([0-9.]+)")
_TOTAL = re.compile(r"total;dur=([0-9.]+)")
_START_S = 300.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the calls came to."""

    own_s: list[float] = field(default_factory=list[float])
    outside_s: list[float] = field(default_factory=list[float])
    whole_s: list[float] = field(default_factory=list[float])
    errors: list[str] = field(default_factory=list[str])


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@contextlib.asynccontextmanager
async def service(directory: Path) -> AsyncGenerator[tuple[int, str]]:
    """Run a service; yields its process id and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotage", "serve", "--no-auth", "--port", "0", "--data", str(directory),
        "--models", str(_MODELS), stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.pid, (await process.stdout.readline()).decode().split()[-1]
    finally:
        process.terminate()
        await process.wait()


async def start_job(http: httpx.AsyncClient) -> str:
    """Create a job of the tiny policy and wait until it runs."""
    config = {"max_seq_len": 256, "n_gpus": 1}
    sub_job = {"job_type": "sampling", "model_name": "policy", "inference_config": config}
    body = {"sub_job_configs": [sub_job], "x-pilotage": {"engine": {"max_batch": 64}}}
    reply = await http.post(_PREFIX, json=body)
    reply.raise_for_status()
    job_id = reply.json()["job_id"]
    async with asyncio.timeout(_START_S):
        while (status := (await http.get(f"{_PREFIX}/{job_id}")).json()["status"]) != "running":
            assert status not in ("failed", "cancelled", "terminated"), status
            await asyncio.sleep(0.2)
    return job_id


def timing_s(reply: httpx.Response, part: re.Pattern[str]) -> float:
    """Return a part of what a reply says about its time."""
    found = part.search(reply.headers["server-timing"])
    assert found is not None
    return float(found[1]) / 1e3


async def sample(
    http: httpx.AsyncClient, job_id: str, body: bytes, operation_id: str
) -> tuple[httpx.Response, float]:
    """Make one call; returns the reply that has its outcome, and how long the service had it."""
    reply = await http.post(
        f"{_PREFIX}/{job_id}/core/sample", params={"operation_id": operation_id, "wait_s": 30}, content=body
    )
    total_s = timing_s(reply, _TOTAL)
    while reply.status_code == 202:
        url = f"{_PREFIX}/{job_id}/core/operations/{operation_id}"
        reply = await http.get(url, params={"wait_s": 30})
        total_s += timing_s(reply, _TOTAL)
    return reply, total_s


async def keep_asking(http: httpx.AsyncClient, job_id: str, index: int, until: float, tally: Tally) -> None:
    """Keep one call in flight until the time is over."""
    rng = np.random.default_rng(index)
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=index)
    turn = 0
    while time.perf_counter() < until:
        prompt = rng.integers(10, 200, PROMPT_TOKENS).astype(np.int32)
        session = f"session-{index % SESSIONS}"
        body = encode_frame(pack_sample_request(prompt, params, session_id=session, turn_index=turn))
        started = time.perf_counter()
        try:
            reply, total_s = await sample(http, job_id, body, f"{index}-{turn}")
            whole_s = time.perf_counter() - started
            assert reply.status_code == 200, reply.text
            assert unpack_completion(decode_frame(reply.content)).token_ids.size > 0
            work_s = timing_s(reply, _WORK)
        except (httpx.HTTPError, AssertionError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
        else:
            tally.whole_s.append(whole_s)
            tally.own_s.append(total_s - work_s)
            tally.outside_s.append(whole_s - total_s)
        turn += 1


def percentiles_ms(seconds: list[float]) -> str:
    """Return p50 and p99."""
    cut = statistics.quantiles(seconds, n=100)
    return f"p50 {cut[49] * 1e3:8.1f} ms   p99 {cut[98] * 1e3:8.1f} ms"


def memory_of(pids: dict[str, int]) -> dict[str, float]:
    """Return the resident memory of processes, in MiB."""
    return {name: resident_mib(pid) for name, pid in pids.items()}


def first_child(pid: int) -> int:
    """Return the id of a process's first child: the front's is the engine."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


async def load(clients: Sequence[httpx.AsyncClient], front: int, seconds: float) -> None:
    """Put the load on a service, a client for each session, and print what came of it."""
    job_id = await start_job(clients[0])
    pids = {"front": front, "engine": first_child(front)}
    memory = {"start": memory_of(pids)}
    tally, began = Tally(), time.perf_counter()

    async def look(share: float) -> None:
        await asyncio.sleep(seconds * share)
        memory[f"{share:.0%}"] = memory_of(pids)

    async with asyncio.TaskGroup() as group:
        for share in (0.25, 0.5, 0.75, 1.0):
            group.create_task(look(share))
        for index in range(IN_FLIGHT):
            http = clients[index % SESSIONS]
            group.create_task(keep_asking(http, job_id, index, began + seconds, tally))
    show(tally, memory, time.perf_counter() - began)


async def main(seconds: float) -> None:
    """Run the load against a service of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        async with service(Path(scratch)) as (front, url), contextlib.AsyncExitStack() as stack:
            clients = [httpx.AsyncClient(base_url=url, timeout=120) for _ in range(SESSIONS)]
            for client in clients:
                await stack.enter_async_context(client)
            await load(clients, front, seconds)


def show(tally: Tally, memory: dict[str, dict[str, float]], took_s: float) -> None:
    """Print the report."""
    print(
        f"{IN_FLIGHT} in flight, {SESSIONS} sessions, {took_s:.0f} s; load average {os.getloadavg()[0]:.1f}"
    )
    print(f"samples          {len(tally.own_s):8}   {len(tally.own_s) / took_s:8.1f} a second")
    print(f"errors           {len(tally.errors):8}   {'; '.join(sorted(set(tally.errors))[:3])}")
    print(f"service's own    {percentiles_ms(tally.own_s)}")
    print(f"before and after {percentiles_ms(tally.outside_s)}")
    print(f"whole call       {percentiles_ms(tally.whole_s)}")
    for name, sizes in memory.items():
        print(f"memory at {name:5}  front {sizes['front']:6.0f} MiB   engine {sizes['engine']:6.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the training service under load.")
    parser.add_argument("seconds", type=float, nargs="?", default=600.0)
    asyncio.run(main(parser.parse_args().seconds))
