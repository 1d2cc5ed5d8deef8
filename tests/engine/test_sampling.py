import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.engine.models import STOP, VOCAB_SIZE, module_logprobs, random_ids

from pilotage.engine import LocalEngine
from pilotage.errors import ContextExceededError, SamplerError
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds


async def open_engine(model_dir: Path, *, max_batch: int = 8, stop: int = VOCAB_SIZE) -> LocalEngine:
    """By default with a stop token that is outside the vocabulary, so that nothing ends early."""
    return await LocalEngine.open(
        model_dir, max_context_tokens=256, max_batch=max_batch, stop_token_ids=[stop], device="cpu"
    )


async def sample(
    engine: LocalEngine, prompt: TokenIds, params: SamplingParams, *, turn_index: int = 0
) -> Completion:
    return await engine.sample(prompt, params, session_id="s", turn_index=turn_index)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_log_probs_over_reused_turns_are_those_of_a_plain_forward_pass(
    model_dirs: dict[str, Path], name: str, temperature: float
) -> None:
    engine = await open_engine(model_dirs[name])
    rng = np.random.default_rng(1)
    shared = random_ids(rng, 40)  # the group's prompt
    prompts = [np.concatenate([shared, random_ids(rng, size)]) for size in (1, 7, 0, 30)]
    try:
        for turn in range(3):
            params = [SamplingParams(temperature=temperature, max_tokens=6, seed=seed) for seed in range(4)]
            answers = await asyncio.gather(
                *(sample(engine, p, q, turn_index=turn) for p, q in zip(prompts, params, strict=True))
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                ids = [*prompt.tolist(), *answer.token_ids.tolist()]
                expected_KV = module_logprobs(model_dirs[name], ids, temperature=temperature or 1.0)[-6:]
                chosen = expected_KV[np.arange(6), answer.token_ids]
                np.testing.assert_allclose(answer.logprobs, chosen, atol=1e-5, rtol=0)
                if temperature == 0:
                    assert answer.token_ids.tolist() == expected_KV.argmax(axis=1).tolist()
            prompts = [
                np.concatenate([prompt, answer.token_ids, random_ids(rng, 5)])
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
    finally:
        await engine.close()


async def test_what_a_request_draws_depends_on_its_seed_and_turn_alone(model_dirs: dict[str, Path]) -> None:
    # Logits differ in their last bits with the batch's shape, so this holds but for draws within about 1e-7
    # of the border between two tokens: here 40 requests x 12 tokens.
    prompts = [random_ids(np.random.default_rng(index), 3 + index) for index in range(40)]
    params = [SamplingParams(max_tokens=12, seed=index) for index in range(40)]
    alone, together = (
        await open_engine(model_dirs["qwen3"], max_batch=1),
        await open_engine(model_dirs["qwen3"]),
    )
    try:
        one_by_one = [await sample(alone, p, q) for p, q in zip(prompts, params, strict=True)]
        order = np.random.default_rng(9).permutation(40).tolist()
        mixed = await asyncio.gather(*(sample(together, prompts[i], params[i]) for i in order))
    finally:
        await alone.close()
        await together.close()

    for index, answer in zip(order, mixed, strict=True):
        assert answer.token_ids.tolist() == one_by_one[index].token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, one_by_one[index].logprobs, atol=1e-5)


async def test_another_turn_or_another_seed_draws_otherwise(engine: LocalEngine) -> None:
    prompt = random_ids(np.random.default_rng(0), 5)
    draws = [
        await sample(engine, prompt, SamplingParams(max_tokens=20, seed=seed), turn_index=turn)
        for seed, turn in ((1, 0), (1, 0), (1, 1), (2, 0), (None, 0), (None, 0))
    ]
    ids = [tuple(draw.token_ids.tolist()) for draw in draws]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 5


async def test_tokens_are_drawn_with_the_probabilities_of_the_model(model_dirs: dict[str, Path]) -> None:
    engine = await open_engine(model_dirs["qwen3"])
    prompt, count = random_ids(np.random.default_rng(3), 9), 3000
    try:
        answers = await asyncio.gather(
            *(sample(engine, prompt, SamplingParams(max_tokens=1, seed=seed)) for seed in range(count))
        )
    finally:
        await engine.close()
    observed = np.bincount([int(a.token_ids[0]) for a in answers], minlength=VOCAB_SIZE)
    expected = count * np.exp(
        module_logprobs(model_dirs["qwen3"], [*prompt.tolist(), 0])[-1].astype(np.float64)
    )

    common = expected >= 5  # the rest is one class, as the test's approximation needs
    groups = [*zip(observed[common], expected[common], strict=True)]
    groups.append((observed[~common].sum(), max(expected[~common].sum(), 1e-9)))
    chi_square = sum((o - e) ** 2 / e for o, e in groups if e > 1)
    degrees = len(groups) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)  # four deviations above its mean; seeds are fixed


async def test_a_stop_token_is_the_last_id_and_the_reason(engine: LocalEngine) -> None:
    reasons: set[FinishReason] = set()
    for seed in range(40):
        answer = await sample(engine, np.array([3, 4], np.int32), SamplingParams(max_tokens=30, seed=seed))
        ids = answer.token_ids.tolist()
        assert STOP not in ids[:-1]
        assert (answer.finish_reason is FinishReason.STOP) == (ids[-1] == STOP)
        assert answer.finish_reason is FinishReason.STOP or len(ids) == 30
        reasons.add(answer.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_completion_ends_with_the_context_window(model_dirs: dict[str, Path]) -> None:
    engine = await open_engine(model_dirs["qwen3"])
    try:
        answer = await sample(engine, random_ids(np.random.default_rng(0), 250), SamplingParams())
        assert (answer.token_ids.size, answer.finish_reason) == (6, FinishReason.LENGTH)
        with pytest.raises(ContextExceededError, match="256 tokens and the context window 256"):
            await sample(engine, random_ids(np.random.default_rng(0), 256), SamplingParams())
    finally:
        await engine.close()


@pytest.mark.parametrize("ids", [[], [1, VOCAB_SIZE], [-1]])
async def test_ids_that_are_no_prompt_are_refused(engine: LocalEngine, ids: list[int]) -> None:
    with pytest.raises(SamplerError, match="one or more ids in"):
        await sample(engine, np.array(ids, np.int32), SamplingParams())


async def test_a_cancelled_call_frees_its_row_for_the_next(model_dirs: dict[str, Path]) -> None:
    engine = await open_engine(model_dirs["qwen3"], max_batch=1)
    prompt = np.array([1, 2], np.int32)
    try:
        endless = [
            asyncio.create_task(sample(engine, prompt, SamplingParams(max_tokens=254))) for _ in range(3)
        ]
        await asyncio.sleep(0.02)  # one is decoding, two wait
        for task in endless:
            task.cancel()
        async with asyncio.timeout(20):
            assert (await sample(engine, prompt, SamplingParams(max_tokens=2))).token_ids.size == 2
            results = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError | Completion) for result in results)
        assert isinstance(results[-1], asyncio.CancelledError)
    finally:
        await engine.close()


async def test_closing_fails_the_calls_that_wait(model_dirs: dict[str, Path]) -> None:
    engine = await open_engine(model_dirs["gpt2"], max_batch=1)
    calls = [
        asyncio.create_task(sample(engine, np.array([1], np.int32), SamplingParams(max_tokens=255)))
        for _ in range(3)
    ]
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()

    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, SamplerError) for result in results)
    with pytest.raises(SamplerError, match="closed"):
        await sample(engine, np.array([1], np.int32), SamplingParams())
