"""`pilotage serve --engine ray`: a job over the wire whose policy is held by Ray actors, here on the CPU."""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.service.rig import PREFIX, Rig, batch, job_body, measured, rig, sample, step_body

from pilotage.cli.engine import cluster_config
from pilotage.engine.lora import LoraOptions
from pilotage.errors import ConfigError
from pilotage.processes import identify
from pilotage.service.engine_host import JobSpec
from pilotage.types import SamplingParams
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.jobs import CreateJobBody
from pilotage.wire.samples import pack_sample_request, unpack_completion

pytestmark = pytest.mark.slow

RAY = (sys.executable, "-m", "pilotage.cli.engine", "ray")
LOCAL = (*RAY[:-1], "local")
POLICY = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "policy"
LORA = {"peft_type": "Lora", "target_modules": "all-linear", "r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    shutil.copytree(POLICY, directory / "policy")
    return directory


def served(directory: Path, models: Path) -> Path:
    """Return a service's directory with these models."""
    directory.mkdir(exist_ok=True)
    (directory / "models").symlink_to(models)
    return directory


def with_lora(body: dict[str, Any]) -> dict[str, Any]:
    for sub_job in body["sub_job_configs"]:
        (sub_job.get("training_config") or sub_job["inference_config"])["peft_config"] = LORA
    return body


def children_of(ancestor: int) -> Iterator[int]:
    """Processes that were started below one, however deep."""
    for children in Path(f"/proc/{ancestor}/task").glob("*/children"):  # a list for each thread
        for child in map(int, children.read_text(encoding="ascii").split()):
            yield child
            yield from children_of(child)


async def greedy(service: Rig, job_id: str, name: str) -> tuple[list[int], set[int]]:
    """Return the ids of a greedy completion, and the versions that drew them."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    body = encode_frame(
        pack_sample_request(np.arange(10, 30, dtype=np.int32), params, session_id="s", turn_index=0)
    )
    reply = await service.core(job_id, "sample", operation_id=name, content=body)
    assert reply.status_code == 200, reply.text
    completion = unpack_completion(decode_frame(reply.content))
    return completion.token_ids.tolist(), set(completion.weights_versions.tolist())


async def one_update(service: Rig, job_id: str) -> dict[str, Any]:
    """Accumulate, step and publish once; returns what the trainer said."""
    first = await service.core(
        job_id, "forward_backward", operation_id="fb", sequence=1, content=batch(sample(1.0, 12))
    )
    step = await service.core(job_id, "step", operation_id="st", sequence=2, json=step_body(0.01))
    published = await service.core(job_id, "publish", operation_id="pu", sequence=3)
    assert (first.status_code, step.status_code, published.status_code) == (200, 200, 200), (
        first.text + step.text
    )
    assert published.json()["weights_version"] == 1
    return {"loss": measured(first).loss, "grad_norm": step.json()["grad_norm"]}


async def on(command: tuple[str, ...], directory: Path, models: Path) -> tuple[dict[str, Any], list[Any]]:
    """Run an update on one kind of engine; returns what the trainer said, and greedy ids before and after."""
    others = set(children_of(os.getpid()))  # of other tests
    async with rig(served(directory, models), command=command) as service:
        job_id = await service.create()
        assert await service.until(job_id, "running", timeout_s=180) == "running"
        before = await greedy(service, job_id, "before")
        said = await one_update(service, job_id)
        after = await greedy(service, job_id, "after")
        started = set(children_of(os.getpid())) - others
        assert len(started) > 1 or command is LOCAL
        cancelled = await service.http.post(f"{PREFIX}/{job_id}:cancel")
        assert cancelled.status_code == 200, cancelled.text
    async with asyncio.timeout(20):  # Ray's agents follow the cluster that they belong to
        while any(map(identify, started)):  # noqa: ASYNC110 - no end of a foreign process is announced
            await asyncio.sleep(0.1)
    return said, [before, after]


async def test_a_job_on_ray_updates_and_samples_as_one_on_the_local_engine_and_leaves_nothing(
    tmp_path: Path, models: Path
) -> None:
    local_said, local_ids = await on(LOCAL, tmp_path / "local", models)
    ray_said, ray_ids = await on(RAY, tmp_path / "ray", models)
    assert ray_said == pytest.approx(local_said, rel=1e-4)
    assert ray_ids == local_ids
    assert [versions for _, versions in ray_ids] == [{0}, {1}]


def spec_of(directory: Path, body: dict[str, Any]) -> JobSpec:
    return JobSpec(
        job_id="j",
        body=CreateJobBody.model_validate(body),
        model_dir=POLICY,
        source_checkpoint=None,
        directory=directory,
        socket=directory / "s",
    )


def test_a_job_for_many_gpus_becomes_ranks_and_replicas_with_its_adapter(tmp_path: Path) -> None:
    body = with_lora(job_body(n_gpus=4)) | {"x-pilotage": {"engine": {"tensor_parallel": 2}}}
    config = cluster_config(spec_of(tmp_path, body), has_gpus=True)
    assert (config.trainer_ranks, config.sampler_replicas, config.device) == (4, 2, "cuda")
    assert config.trainer.lora == LoraOptions(rank=4, alpha=8)
    assert sum(bundle["GPU"] for bundle in config.bundles()) == 8


def test_a_job_that_ray_cannot_hold_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    odd = job_body(n_gpus=3) | {"x-pilotage": {"engine": {"tensor_parallel": 2}}}
    without_sampler = job_body()
    del without_sampler["sub_job_configs"][1]
    for body, what in ((odd, "tensor_parallel 2; got 3"), (without_sampler, "got 0 for sampling")):
        with pytest.raises(ConfigError, match=what):
            cluster_config(spec_of(tmp_path, body), has_gpus=False)
