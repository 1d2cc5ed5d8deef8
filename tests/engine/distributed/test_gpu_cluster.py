"""The real thing on one GPU: an FSDP2 rank and a vLLM replica that share it, placed by Ray.

Run with `-s` it prints what a machine can be compared by: gap, tokens per second, seconds of a publish.
"""

import asyncio
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.models import write_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from pilotage.engine.distributed.fsdp import TrainerOptions
from pilotage.types import AdamParams, Completion, LossConfig, Sample, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (pilotage[gpu])"),
]

STEPS = 4
GROUPS, GROUP_SIZE = 8, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 256, 256
VOCAB_SIZE = 32_768


def write_model(directory: Path) -> Path:
    """About 190 million random weights in the layout of Qwen3."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def to_sample(name: str, prompt: np.ndarray, completion: Completion, advantage: float) -> Sample:
    before, sampled = prompt.size, completion.token_ids.size
    mask = np.repeat([False, True], [before, sampled])
    return Sample(
        sequence_id=name,
        group_id=name.split("/")[0],
        token_ids=np.concatenate([prompt, completion.token_ids]),
        loss_mask=mask,
        sampler_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights_versions=np.concatenate([np.full(before, -1, np.int32), completion.weights_versions]),
    )


def report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass
class Timings:
    sampled_tokens: int = 0
    sampling_s: float = 0.0
    trained_tokens: int = 0
    training_s: float = 0.0
    publishing_s: float = 0.0


async def test_four_steps_on_one_gpu(tmp_path: Path) -> None:
    from pilotage.engine.distributed.ray_engine import ClusterConfig, RayEngine

    config = ClusterConfig(
        shares_gpus=True,
        max_context_tokens=1024,
        max_batch=64,
        stop_token_ids=(0,),
        trainer=TrainerOptions(micro_batch_tokens=16_384),
    )
    engine = await RayEngine.open(write_model(tmp_path / "model"), config)
    timings, rng = Timings(), np.random.default_rng(0)
    try:
        for step in range(STEPS):
            started = time.perf_counter()
            prompts = rng.integers(1, VOCAB_SIZE, (GROUPS, PROMPT_TOKENS)).astype(np.int32)
            params = SamplingParams(max_tokens=COMPLETION_TOKENS, seed=step)
            names = [f"{group}/{member}" for group in range(GROUPS) for member in range(GROUP_SIZE)]
            completions = await asyncio.gather(
                *(
                    engine.sample(
                        prompts[index // GROUP_SIZE], params, session_id=name, turn_index=index % GROUP_SIZE
                    )
                    for index, name in enumerate(names)
                )
            )
            sampled = time.perf_counter()
            samples = [
                to_sample(name, prompts[index // GROUP_SIZE], completion, float(rng.normal()))
                for index, (name, completion) in enumerate(zip(names, completions, strict=True))
            ]
            result = await engine.forward_backward(samples, LossConfig())
            await engine.step(AdamParams(learning_rate=1e-4))
            trained = time.perf_counter()
            assert await engine.publish() == step + 1  # probes the sampler, or raises
            published = time.perf_counter()

            assert {int(v) for c in completions for v in c.weights_versions} == {step}
            assert result.logprob_gap_mean is not None
            assert result.logprob_gap_mean < 0.05
            timings.sampled_tokens += sum(c.token_ids.size for c in completions)
            timings.sampling_s += sampled - started
            timings.trained_tokens += result.forwarded_tokens
            timings.training_s += trained - sampled
            timings.publishing_s += published - trained
            report(f"step {step + 1}: loss {result.loss:.5f}, gap {result.logprob_gap_mean:.5f} nats a token")
    finally:
        await engine.close()
    report(
        f"sampled {timings.sampled_tokens / timings.sampling_s:.0f} tokens/s,"
        f" trained {timings.trained_tokens / timings.training_s:.0f} tokens/s,"
        f" a publish takes {timings.publishing_s / STEPS:.2f} s"
    )
