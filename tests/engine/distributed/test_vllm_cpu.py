"""The adapter against vLLM itself, its build for CPUs: an optional job, see scripts/vllm_cpu_check.sh."""

import contextlib
import importlib.util
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import torch

from pilotage.engine.distributed.probe import TOLERANCE_FLOAT32, check, probe
from pilotage.engine.distributed.vllm_sampler import VllmSampler, VllmSettings
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import TrainerError
from pilotage.types import AdamParams, Completion, LossConfig, Sample, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM; scripts/vllm_cpu_check.sh"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about vLLM's build for CPUs"),
]
POLICY = Path(__file__).resolve().parents[3] / "recipes" / "demo" / "policy"
VOCAB_SIZE, STOP = 1732, 2
PARAMS = SamplingParams(temperature=0.7, max_tokens=24, seed=3)
PROMPT = np.arange(100, 400, dtype=np.int32)
"""More than two blocks of the prefix cache, which have 128 tokens on a CPU."""


@contextlib.asynccontextmanager
async def opened(model: Path) -> AsyncGenerator[tuple[VllmSampler, TorchTrainer]]:
    settings = VllmSettings(
        model_dir=model,
        max_context_tokens=512,
        max_batch=8,
        stop_token_ids=(STOP,),
        dtype="float32",
        weight_backend="ipc",  # never used: nothing is transferred between processes of CPUs
    )
    sampler = VllmSampler(settings)
    try:
        yield sampler, TorchTrainer(model, device=torch.device("cpu"), micro_batch_tokens=4096)
    finally:
        await sampler.close()


def to_sample(completion: Completion) -> Sample:
    before, sampled = PROMPT.size, completion.token_ids.size
    mask = np.repeat([False, True], [before, sampled])
    return Sample(
        sequence_id="s",
        group_id="g",
        token_ids=np.concatenate([PROMPT, completion.token_ids]),
        loss_mask=mask,
        sampler_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        advantages=mask.astype(np.float32),
        weights_versions=np.where(mask, 0, -1).astype(np.int32),
    )


async def test_ids_go_in_and_come_out_with_the_trainers_logprobs_and_a_stale_sampler_is_caught(
    tmp_path: Path,
) -> None:
    model = Path(shutil.copytree(POLICY, tmp_path / "policy"))
    async with opened(model) as (sampler, trainer):
        first = await sampler.sample(PROMPT, PARAMS, session_id="s", turn_index=0)
        again = await sampler.sample(PROMPT, PARAMS, session_id="s", turn_index=0)
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert 0 < first.token_ids.size == first.logprobs.size <= 24

        # Processed log-probs: those of the trainer at the sampling temperature.
        sample = to_sample(first)
        [scored] = trainer.forward([sample], temperature=0.7)
        assert np.abs(scored - sample.sampler_logprobs)[sample.loss_mask].max() < 1e-4

        # A context that was seen is not computed again.
        wanted = sampler._connection.sampling_params(temperature=1.0, max_tokens=1)
        outputs = sampler._engine.generate({"prompt_token_ids": PROMPT.tolist()}, wanted, "cached")
        cached = [output.num_cached_tokens async for output in outputs]
        assert cached[-1] == 256

        probed = await probe(sampler, vocab_size=VOCAB_SIZE)
        check(probed, trainer.forward(probed, temperature=1.0), version=0, tolerance=TOLERANCE_FLOAT32)

        # The trainer goes on, and vLLM is told to load its weights in place: the probe says what came of it.
        trainer.forward_backward([sample], LossConfig(temperature=0.7))
        trainer.step(AdamParams(learning_rate=1e-2))
        trainer.module.save_pretrained(model)
        await sampler.pause()
        # On a CPU this answers without an error, and does not take the weights whole.
        await sampler._engine.collective_rpc("reload_weights")  # pyright: ignore
        await sampler.resume(1)
        probed = await probe(sampler, vocab_size=VOCAB_SIZE)
        with pytest.raises(TrainerError, match=r"differ by .* the sampler has other weights"):
            check(probed, trainer.forward(probed, temperature=1.0), version=1, tolerance=TOLERANCE_FLOAT32)
