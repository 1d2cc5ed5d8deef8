"""LoRA on the local engine, asked for by a recipe and by a job; Tinker's SDK has a file of its own."""

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file
from tests.chaos.killed_runs import write_experiment
from tests.service.rig import LOCAL, PREFIX, Rig, batch, job_body, rig, sample, step_body

from pilotage.cli.engine import open_local as open_job
from pilotage.engine.modules import load_module
from pilotage.errors import ConfigError
from pilotage.recipes import load_recipe
from pilotage.recipes.embedded import open_local
from pilotage.recipes.stack import job_plan
from pilotage.rendering import load_renderer
from pilotage.service.engine_host import JobSpec
from pilotage.wire.jobs import CreateJobBody

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "recipes" / "demo" / "policy"
LORA = {"peft_type": "Lora", "target_modules": "all-linear", "r": 4, "lora_alpha": 8}
ASKED = 'policy.peft_config={peft_type="Lora",target_modules="all-linear",r=4,lora_alpha=8}'
IDS = np.arange(20, 36, dtype=np.int32)

# peft asks the model under a name that transformers is about to drop.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def scores(module: Any) -> NDArray[np.float32]:
    """Return what a module gives to each id after the first."""
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(module(input_ids=ids[None]).logits[0, :-1], -1)
    return logprobs[torch.arange(ids.numel() - 1), ids[1:]].numpy()


def peft_scores(adapter: Path) -> NDArray[np.float32]:
    """Return what stock peft makes of the demo's policy and an adapter directory."""
    module = load_module(POLICY, device=torch.device("cpu"))
    return scores(PeftModel.from_pretrained(module, adapter))


async def test_a_recipe_trains_an_adapter_which_peft_reads_and_an_evaluation_opens(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    words = ["train", "recipe.toml", "loop.num_steps=2", "loop.optimizer.learning_rate=1e-2", ASKED]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "pilotage", *words, "--run-name", "lora"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = tmp_path / "runs" / "lora" / "checkpoints" / "step-0002"
    expected = peft_scores(checkpoint)
    base = scores(load_module(POLICY, device=torch.device("cpu")))
    assert np.abs(expected - base).max() > 1e-3

    recipe = load_recipe(tmp_path / "recipe.toml", [ASKED])
    engine = await open_local(recipe, checkpoint, load_renderer(POLICY))
    try:
        whole = replace(sample(0.0, IDS.size), token_ids=IDS, loss_mask=np.arange(IDS.size) > 0)
        zeros = np.zeros(IDS.size, np.float32)
        whole = replace(whole, sampler_logprobs=zeros, advantages=zeros)
        (found,) = await engine.forward([whole], temperature=1.0)
    finally:
        await engine.close()
    np.testing.assert_allclose(found[1:], expected, atol=2e-5)
    with pytest.raises(ConfigError, match="is an adapter and no model; give the peft_config"):
        await open_local(load_recipe(tmp_path / "recipe.toml"), checkpoint, load_renderer(POLICY))


def test_the_same_words_ask_a_service_and_tinker_has_its_own(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    recipe = load_recipe(tmp_path / "recipe.toml", [ASKED, "backend=cortex", "loop.seed=5"])
    body = job_plan(recipe, load_renderer(POLICY), None).body
    assert body.adapter is not None
    assert (body.adapter.r, body.adapter.lora_alpha, body.adapter_seed) == (4, 8, 5)
    assert CreateJobBody.model_validate(body.model_dump(mode="json", by_alias=True)) == body
    with pytest.raises(ConfigError, match=r"give tinker\.lora_rank instead"):
        load_recipe(tmp_path / "recipe.toml", [ASKED, "backend=tinker"])


def with_lora(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    for sub_job in body["sub_job_configs"]:
        (sub_job.get("training_config") or sub_job["inference_config"])["peft_config"] = LORA | changes
    return body


async def polled(service: Rig, job_id: str, path: str, **content: Any) -> dict[str, Any]:
    """Make a call of the stock data plane, and wait for its result."""
    asked = await service.http.post(f"{PREFIX}/{job_id}/{path}", json=content)
    assert asked.status_code == 200, asked.text
    request = asked.json()["request_id"]
    while True:
        reply = (await service.http.get(f"{PREFIX}/{job_id}/requests/{request}")).json()
        if reply["status"] not in ("pending", "running"):
            assert reply["status"] == "completed", reply
            return reply["result"]


async def downloaded(service: Rig, job_id: str, checkpoint_id: str, directory: Path) -> Path:
    """Take a checkpoint's files as an export lists them."""
    listed = await service.http.post(f"{PREFIX}/{job_id}/checkpoints/{checkpoint_id}:export")
    for file in listed.json()["files"]:
        path = directory / file["filename"]
        path.parent.mkdir(parents=True, exist_ok=True)
        reply: httpx.Response = await service.http.get(file["url"])
        assert len(reply.content) == file["size_bytes"]
        path.write_bytes(reply.content)
    return directory


async def test_a_job_trains_an_adapter_syncs_it_and_gives_it_out(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    shutil.copytree(POLICY, tmp_path / "models" / "policy")
    async with rig(tmp_path, command=LOCAL) as service:
        created = await service.http.post(PREFIX, json=with_lora(job_body()))
        job_id = created.json()["job_id"]
        assert await service.until(job_id, "running", timeout_s=120) == "running"
        for number, (verb, call) in enumerate(
            (
                ("forward_backward", {"content": batch(sample(1.0, 12))}),
                ("step", {"json": step_body(0.01)}),
            ),
            start=1,
        ):
            reply = await service.core(job_id, verb, operation_id=verb, sequence=number, **call)
            assert reply.status_code == 200, reply.text
        synced = await polled(
            service,
            job_id,
            "operation",
            operation_type="weight-sync",
            payload={
                "source_sub_job_id": f"{job_id}:training:0",
                "target_sub_job_ids": [f"{job_id}:sampling:0"],
                "weight_format": "lora",
            },
        )
        assert synced == {"weights_version": 1}
        saved = await polled(service, job_id, "save", checkpoint_type="weights-only")
        resumable = await polled(service, job_id, "save")
        await polled(service, job_id, "load", checkpoint_id=resumable["checkpoint_id"])
        taken = await downloaded(service, job_id, saved["checkpoint_id"], tmp_path / "taken")
        kept = await downloaded(service, job_id, resumable["checkpoint_id"], tmp_path / "kept")
    found = scores(load_module(taken, device=torch.device("cpu")))
    np.testing.assert_allclose(found, peft_scores(taken / "adapter"), atol=2e-5)
    assert np.abs(found - scores(load_module(POLICY, device=torch.device("cpu")))).max() > 1e-3
    one, other = (load_file(path / "adapter_model.safetensors") for path in (taken / "adapter", kept))
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    assert (kept / "optimizer.safetensors").exists()
    assert not (kept / "model.safetensors").exists()


async def test_an_adapter_that_does_not_fit_the_model_says_so(tmp_path: Path) -> None:
    spec = JobSpec(
        job_id="j",
        body=CreateJobBody.model_validate(with_lora(job_body(), target_modules=["query_key_value"])),
        model_dir=POLICY,
        source_checkpoint=None,
        directory=tmp_path,
        socket=tmp_path / "s",
    )
    with pytest.raises(ConfigError, match=r"LoRA cannot be put into this model: .*query_key_value"):
        await open_job(spec)
