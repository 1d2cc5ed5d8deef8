"""A service in this process with engines in others, and a client for it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pilotage.service.app import Service
from pilotage.service.jobs import Jobs
from pilotage.service.store import Store
from pilotage.service.tokens import TokenBook
from pilotage.types import ForwardBackwardResult, LossConfig, Sample
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.records import unpack_result
from pilotage.wire.samples import pack_samples

PREFIX = "/api/v2/databases/db/schemas/public/cortex-training"
SCRIPTED = (sys.executable, str(Path(__file__).parent / "scripted_engine.py"))
LOCAL = (sys.executable, "-m", "pilotage.cli.engine", "local")


@dataclass(slots=True, kw_only=True)
class Rig:
    """What a test works with."""

    jobs: Jobs
    store: Store
    http: httpx.AsyncClient
    app: Any

    async def create(self, **changes: Any) -> str:
        """Create a job; returns its id."""
        reply = await self.http.post(PREFIX, json=job_body(**changes))
        assert reply.status_code == 200, reply.text
        return reply.json()["job_id"]

    async def running(self, **changes: Any) -> str:
        """Create a job and wait until it runs."""
        job_id = await self.create(**changes)
        assert await self.until(job_id, "running") == "running"
        return job_id

    async def until(self, job_id: str, *statuses: str, timeout_s: float = 30.0) -> str:
        """Wait until a job has one of these states; returns the state."""
        async with asyncio.timeout(timeout_s):
            while True:
                job = (await self.http.get(f"{PREFIX}/{job_id}")).json()
                if job["status"] in (*statuses, "failed", "cancelled", "terminated"):
                    return job["status"]
                await asyncio.sleep(0.02)

    async def core(
        self, job_id: str, verb: str, *, operation_id: str, sequence: int | None = None, **request: Any
    ) -> httpx.Response:
        """Make a call of the strict core, and wait for its outcome."""
        query = {"operation_id": operation_id, "wait_s": "20"}
        if sequence is not None:
            query["sequence"] = str(sequence)
        return await self.http.post(f"{PREFIX}/{job_id}/core/{verb}", params=query, **request)


def job_body(model: str = "policy", *, n_gpus: int = 1, lr: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Return a create body of one trainer and one sampler."""
    return {
        "sub_job_configs": [
            {
                "job_type": "training",
                "model_name": model,
                "training_config": {
                    "optimizer": {"name": "AdamW", "lr": lr},
                    "max_seq_len": 64,
                    "train_batch_size": 1,
                    "n_gpus": n_gpus,
                },
            },
            {
                "job_type": "sampling",
                "model_name": model,
                "inference_config": {"max_seq_len": 64, "n_gpus": n_gpus},
            },
        ],
        **changes,
    }


def sample(advantage: float = 1.0, size: int = 4, *, name: str = "r0") -> Sample:
    """Return a sample of `size` tokens whose last two are trained with `advantage`."""
    mask = np.zeros(size, np.bool_)
    mask[-2:] = True
    return Sample(
        sequence_id=name,
        group_id="g0",
        token_ids=np.arange(1, size + 1, dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        weights_versions=np.where(mask, np.int32(1), np.int32(-1)),
    )


def batch(*samples: Sample, loss: LossConfig | None = None) -> bytes:
    """Return the body of a forward_backward."""
    return encode_frame(pack_samples(samples or (sample(),), loss or LossConfig(), None))


def measured(reply: httpx.Response) -> ForwardBackwardResult:
    """Return what a forward_backward answered."""
    assert reply.status_code == 200, reply.text
    return unpack_result(decode_frame(reply.content))


def step_body(learning_rate: float = 0.5) -> dict[str, float]:
    """Return the body of a step: all Adam parameters."""
    return {
        "learning_rate": learning_rate,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }


@contextlib.asynccontextmanager
async def rig(
    directory: Path,
    *,
    command: tuple[str, ...] = SCRIPTED,
    capacity: int = 8,
    with_auth: bool = False,
    clock: Callable[[], float] | None = None,
    ends_jobs: bool = True,
) -> AsyncGenerator[Rig]:
    """Run a service on `directory`; its engines are gone afterwards unless `ends_jobs` is False."""
    models = directory / "models"
    if not (models / "policy").exists():
        (models / "policy").mkdir(parents=True)
        (models / "policy" / "config.json").write_text("{}")
    store = Store(directory / "service.db")
    given: dict[str, Any] = {} if clock is None else {"clock": clock}
    jobs = Jobs(
        store,
        directory=directory / "jobs",
        models=models,
        capacity={"H200": capacity},
        engine_command=command,
        **given,
    )
    service = Service(jobs, TokenBook(store) if with_auth else None)
    await jobs.restore()
    transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        supervisor = group.create_task(jobs.supervise())
        try:
            yield Rig(jobs=jobs, store=store, http=http, app=service.app)
        finally:
            supervisor.cancel()
            await (jobs.close() if ends_jobs else jobs.detach())
            store.close()
