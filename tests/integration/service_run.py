"""A small training run over any engine, and the digest of the weights that it ends with."""

import hashlib
from pathlib import Path

import numpy as np

from pilotage.client import CoreEngine
from pilotage.interfaces import Engine
from pilotage.types import AdamParams, LossConfig, PolicyLoss, Reduction, Sample, SamplingParams, token_ids

LOSS = LossConfig(
    policy_loss=PolicyLoss.GSPO, reduction=Reduction.SEQUENCE_MEAN, clip_low=0.1, clip_high=0.2, kl_coef=0.02
)
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16))


async def step(engine: Engine, number: int) -> None:
    """Sample, accumulate two gradients, step, publish."""
    samples: list[Sample] = []
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=6, seed=100 * number + index)
        completion = await engine.sample(token_ids(prompt), params, session_id=f"s{index}", turn_index=number)
        size = len(prompt) + completion.token_ids.size
        mask = np.arange(size) >= len(prompt)
        logprobs, advantages = np.zeros(size, np.float32), np.zeros(size, np.float32)
        logprobs[mask], advantages[mask] = completion.logprobs, (-1.0, 0.5, 1.0)[index]
        samples.append(
            Sample(
                sequence_id=f"step-{number}-{index}",
                group_id=f"step-{number}",
                token_ids=np.concatenate([token_ids(prompt), completion.token_ids]),
                loss_mask=mask,
                sampler_logprobs=logprobs,
                advantages=advantages,
                weights_versions=np.where(mask, np.int32(engine.weights_version), np.int32(-1)),
            )
        )
    await engine.forward_backward(samples[:2], LOSS)
    await engine.forward_backward(samples[2:], LOSS)
    applied = await engine.step(AdamParams(learning_rate=1e-3))
    assert applied.num_backwards == 2
    await engine.publish()


def digest_of_weights(checkpoint: Path) -> str:
    """Return the digest of a checkpoint's weights and optimizer."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


async def run(engine: CoreEngine, directory: Path, *, num_steps: int, first: int = 0) -> None:
    """Run some steps and save."""
    for number in range(first, first + num_steps):
        await step(engine, number)
    await engine.save(directory)
