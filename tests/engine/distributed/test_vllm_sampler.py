"""The vLLM adapter against a fake of vLLM's calls, on a real model."""

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.distributed.fake_vllm import FakeVllm, connect_fake
from tests.engine.models import STOP, VOCAB_SIZE, module_logprobs
from tests.engine.test_trainer import WIDE, batch

from pilotage.engine.distributed.probe import TOLERANCE_FLOAT32, check, probe
from pilotage.engine.distributed.vllm_sampler import VllmSampler, VllmSettings, connect_vllm
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import ConfigError, ContextExceededError, SamplerError, TrainerError
from pilotage.types import AdamParams, FinishReason, SamplingParams, token_ids

PROMPT = token_ids([1, 2, 3])


def sampler_of(engine: FakeVllm, *, stops: tuple[int, ...] = (STOP,)) -> VllmSampler:
    settings = VllmSettings(
        model_dir=engine.model_dir, max_context_tokens=64, max_batch=4, stop_token_ids=stops
    )
    return VllmSampler(settings, connect=connect_fake(engine))


async def test_ids_go_in_and_ids_come_out_with_the_log_probs_they_were_sampled_with(
    model_dirs: dict[str, Path],
) -> None:
    sampler = sampler_of(FakeVllm(model_dir=model_dirs["qwen3"]), stops=())
    params = SamplingParams(temperature=0.7, max_tokens=9, seed=3)

    answer = await sampler.sample(PROMPT, params, session_id="s", turn_index=0)

    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.weights_versions.tolist() == [0] * 9
    rows = module_logprobs(
        model_dirs["qwen3"], [*PROMPT.tolist(), *answer.token_ids.tolist()], temperature=0.7
    )
    np.testing.assert_allclose(answer.logprobs, rows[2:][np.arange(9), answer.token_ids], atol=1e-5)


async def test_a_seed_and_a_turn_make_the_same_draws_and_another_turn_makes_others(
    model_dirs: dict[str, Path],
) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"])
    sampler = sampler_of(engine, stops=())
    params = SamplingParams(max_tokens=12, seed=3)

    answers = [
        (await sampler.sample(PROMPT, params, session_id=session, turn_index=turn)).token_ids.tolist()
        for session, turn in (("a", 0), ("b", 0), ("a", 1))
    ]

    assert answers[0] == answers[1] != answers[2]
    assert all(0 <= asked.seed < 2**63 for asked in engine.asked)


async def test_the_stop_token_is_the_last_of_the_answer(model_dirs: dict[str, Path]) -> None:
    sampler = sampler_of(FakeVllm(model_dir=model_dirs["qwen3"]), stops=tuple(range(VOCAB_SIZE)))

    answer = await sampler.sample(PROMPT, SamplingParams(max_tokens=5), session_id="s", turn_index=0)

    assert answer.token_ids.size == 1
    assert answer.finish_reason is FinishReason.STOP


async def test_a_completion_ends_with_the_context_window_and_needs_room_for_a_token(
    model_dirs: dict[str, Path],
) -> None:
    sampler = sampler_of(FakeVllm(model_dir=model_dirs["qwen3"]), stops=())
    params = SamplingParams(max_tokens=100, seed=0)

    answer = await sampler.sample(token_ids([1] * 60), params, session_id="s", turn_index=0)

    assert answer.token_ids.size == 4
    with pytest.raises(ContextExceededError, match="64 tokens and the context window 64"):
        await sampler.sample(token_ids([1] * 64), params, session_id="s", turn_index=1)


async def test_a_cancelled_call_aborts_its_request(model_dirs: dict[str, Path]) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"])
    sampler = sampler_of(engine, stops=())
    await sampler.pause()
    call = asyncio.create_task(sampler.sample(PROMPT, SamplingParams(), session_id="s", turn_index=0))
    await asyncio.sleep(0.01)
    [running] = engine.running

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert engine.running == set()
    assert engine.aborted == [running]


async def test_what_vllm_raises_is_a_sampler_error(model_dirs: dict[str, Path]) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"], fails_with=RuntimeError("out of blocks"))
    with pytest.raises(SamplerError, match="RuntimeError: out of blocks"):
        await sampler_of(engine).sample(PROMPT, SamplingParams(), session_id="s", turn_index=0)


async def test_an_aborted_request_is_no_completion(model_dirs: dict[str, Path]) -> None:
    sampler = sampler_of(FakeVllm(model_dir=model_dirs["qwen3"], ends_with="abort"), stops=())
    with pytest.raises(SamplerError, match="after 1 tokens with 'abort'"):
        await sampler.sample(PROMPT, SamplingParams(max_tokens=4), session_id="s", turn_index=0)


async def learn(model_dir: Path) -> TorchTrainer:
    trainer = TorchTrainer(model_dir, device=torch.device("cpu"), micro_batch_tokens=4096)
    trainer.forward_backward(batch(), WIDE)
    trainer.step(AdamParams(learning_rate=1e-2))
    return trainer


async def send(trainer: TorchTrainer, sampler: VllmSampler) -> None:
    """What the trainer's side of vLLM's weight transfer does."""
    await sampler.init_weight_transfer({"rank_offset": 1})
    await sampler.start_weight_update()
    weights = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    await sampler.update_weights(weights)
    await sampler.finish_weight_update()


async def test_a_request_under_way_goes_on_under_new_weights_with_a_cache_of_their_own(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"])
    sampler, trainer = sampler_of(engine, stops=()), await learn(model_dirs["qwen3"])
    params = SamplingParams(max_tokens=40, seed=1)
    call = asyncio.create_task(sampler.sample(PROMPT, params, session_id="s", turn_index=0))
    await asyncio.sleep(0.01)

    await sampler.pause()
    await send(trainer, sampler)
    await sampler.resume(1)
    answer = await call
    after = await sampler.sample(PROMPT, params, session_id="s", turn_index=0)

    versions = answer.weights_versions
    assert versions.tolist() == sorted(versions.tolist())
    assert set(versions.tolist()) == {0, 1}
    trainer.save_state(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    ids = [*PROMPT.tolist(), *answer.token_ids.tolist()]
    for version, directory in ((0, model_dirs["qwen3"]), (1, tmp_path)):
        here = versions == version
        expected = module_logprobs(directory, ids)[2:][np.arange(40), answer.token_ids]
        np.testing.assert_allclose(answer.logprobs[here], expected[here], atol=2e-5)
    assert after.weights_versions.tolist() == [1] * 40
    assert engine.calls == ["pause", "init [('rank_offset', 1)]", "start", "update", "finish", "resume"]


@pytest.mark.parametrize("ignores_weights", [False, True])
async def test_a_probe_tells_an_engine_that_ignored_the_weights(
    model_dirs: dict[str, Path], ignores_weights: bool
) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"], ignores_weights=ignores_weights)
    sampler, trainer = sampler_of(engine), await learn(model_dirs["qwen3"])
    await sampler.pause()
    await send(trainer, sampler)
    await sampler.resume(1)

    samples = await probe(sampler, vocab_size=VOCAB_SIZE)
    scored = trainer.forward(samples, temperature=1.0)

    if ignores_weights:
        with pytest.raises(TrainerError, match="version 1 a sampler and the trainer differ by"):
            check(samples, scored, version=1, tolerance=TOLERANCE_FLOAT32)
    else:
        check(samples, scored, version=1, tolerance=TOLERANCE_FLOAT32)
        with pytest.raises(TrainerError, match=r"version 2 a sampler answered under \{1\}"):
            check(samples, scored, version=2, tolerance=TOLERANCE_FLOAT32)


async def test_a_closed_sampler_has_ended_its_engine(model_dirs: dict[str, Path]) -> None:
    engine = FakeVllm(model_dir=model_dirs["qwen3"])
    await sampler_of(engine).close()
    assert engine.is_shut_down


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_names_the_extra(tmp_path: Path) -> None:
    settings = VllmSettings(model_dir=tmp_path, max_context_tokens=8, max_batch=1, stop_token_ids=(0,))
    with pytest.raises(ConfigError, match=r"pilotage\[gpu\]"):
        connect_vllm(settings)
