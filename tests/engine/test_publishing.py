"""Weights change under the sampler: versions, contexts, the canary, and a thread that dies."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.models import VOCAB_SIZE, module_logprobs
from tests.engine.test_trainer import batch
from torch import Tensor
from transformers import PreTrainedModel

from pilotage.engine.decoder import Decoder
from pilotage.engine.kv_cache import Lease
from pilotage.engine.local import LocalEngine, build_decoder
from pilotage.engine.sampling_loop import SamplingLoop
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import SamplerError, TrainerError
from pilotage.types import AdamParams, LossConfig, SamplingParams, TokenIds, token_ids

PROMPT = token_ids([1, 2, 3])


class FaultyDecoder:
    """A real decoder that can miss a change of weights, or die at the n-th token."""

    def __init__(self, inner: Decoder, *, misses_weights: bool, dies_at: int) -> None:
        self._inner = inner
        self._misses_weights = misses_weights
        self._left = dies_at
        self.vocab_size, self.max_batch, self.device = inner.vocab_size, inner.max_batch, inner.device

    def acquire(self, context_ids: TokenIds) -> Lease | None:
        return self._inner.acquire(context_ids)

    def prefill(self, leases: Sequence[Lease], *, budget_tokens: int) -> None:
        self._inner.prefill(leases, budget_tokens=budget_tokens)

    def release(self, lease: Lease) -> None:
        self._inner.release(lease)

    def enter(self, lease: Lease) -> None:
        self._inner.enter(lease)

    def leave(self, row: int) -> None:
        self._inner.leave(row)

    def decode(self, token_ids_B: NDArray[np.int64]) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("out of memory")
        return self._inner.decode(token_ids_B)

    def load(self, module: PreTrainedModel) -> None:
        if not self._misses_weights:
            self._inner.load(module)


def engine_of(model_dir: Path, *, misses_weights: bool = False, dies_at: int = 1 << 30) -> LocalEngine:
    trainer = TorchTrainer(model_dir, device=torch.device("cpu"), micro_batch_tokens=4096)
    inner = build_decoder(trainer.module, max_context_tokens=256, max_batch=4)
    decoder = FaultyDecoder(inner, misses_weights=misses_weights, dies_at=dies_at)
    loop = SamplingLoop(decoder, stop_token_ids=(VOCAB_SIZE,), max_context_tokens=256)
    return LocalEngine(trainer=trainer, loop=loop, model_dir=model_dir, trainer_threads=1)


async def learn(engine: LocalEngine) -> None:
    await engine.forward_backward(batch(), LossConfig())
    await engine.step(AdamParams(learning_rate=1e-2))


async def test_tokens_carry_the_version_that_sampled_them(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    engine = engine_of(model_dirs["qwen3"])
    params = SamplingParams(max_tokens=5, seed=0)
    try:
        before = await engine.sample(PROMPT, params, session_id="s", turn_index=0)
        await learn(engine)
        still = await engine.sample(PROMPT, params, session_id="s", turn_index=0)
        assert await engine.publish() == 1
        after = await engine.sample(PROMPT, params, session_id="s", turn_index=0)
        await engine.save(tmp_path / "new")
    finally:
        await engine.close()

    assert before.weights_versions.tolist() == still.weights_versions.tolist() == [0] * 5
    assert before.logprobs.tolist() == still.logprobs.tolist()  # a step alone does not reach the sampler
    assert after.weights_versions.tolist() == [1] * 5
    expected = module_logprobs(tmp_path / "new", [*PROMPT.tolist(), *after.token_ids.tolist()])[2:]
    np.testing.assert_allclose(after.logprobs, expected[np.arange(5), after.token_ids], atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
async def test_a_completion_under_way_goes_on_under_the_new_weights(
    model_dirs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    engine = engine_of(model_dirs[name])
    try:
        await learn(engine)
        call = asyncio.create_task(
            engine.sample(PROMPT, SamplingParams(max_tokens=250, seed=1), session_id="s", turn_index=0)
        )
        await asyncio.sleep(0.03)
        await engine.publish()
        answer = await call
        await engine.save(tmp_path / "new")
    finally:
        await engine.close()

    versions = answer.weights_versions
    assert versions.tolist() == sorted(versions.tolist())
    assert set(versions.tolist()) <= {0, 1}
    assert versions[-1] == 1
    ids = [*PROMPT.tolist(), *answer.token_ids.tolist()]
    for version, directory in ((0, model_dirs[name]), (1, tmp_path / "new")):
        expected = module_logprobs(directory, ids)[2:][np.arange(250), answer.token_ids]
        here = versions == version
        np.testing.assert_allclose(answer.logprobs[here], expected[here], atol=2e-5)


async def test_a_sampler_that_missed_the_weights_fails_the_publish(model_dirs: dict[str, Path]) -> None:
    engine = engine_of(model_dirs["qwen3"], misses_weights=True)
    try:
        assert await engine.publish() == 1  # nothing was learned yet: both have the same weights
        await learn(engine)
        with pytest.raises(TrainerError, match="version 2 sampler and trainer differ by"):
            await engine.publish()
    finally:
        await engine.close()


async def test_a_sampling_thread_that_dies_fails_every_call(model_dirs: dict[str, Path]) -> None:
    engine = engine_of(model_dirs["qwen3"], dies_at=3)
    calls = [
        engine.sample(PROMPT, SamplingParams(max_tokens=10), session_id=str(i), turn_index=0)
        for i in range(6)
    ]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, SamplerError) and "out of memory" in str(result) for result in results)
        with pytest.raises(SamplerError, match="thread died"):
            await engine.sample(PROMPT, SamplingParams(), session_id="s", turn_index=0)
        with pytest.raises(SamplerError, match="thread died"):
            await engine.publish()
        await engine.close()
