"""The embedded sampler against transformers' generate, and the trainer's speed.

Setting: 32 rollouts of 8 tasks, a prompt of 300 tokens of which 200 are the same for all, six turns of 25
sampled and 60 observed tokens, a random Qwen3 policy of 0.7 million parameters, one intra-op thread, float32,
nothing ends early. transformers generates the same numbers of tokens from the same contexts, in one batch of
32, with its own cache within a turn.

Times are CPU seconds of this process, medians over repeats that alternate between the two, because another
program on the machine then costs both alike.

    python benchmarks/bench_sampler.py [REPEATS]
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pilotage.engine import LocalEngine, PolicyConfig, create_policy
from pilotage.engine.modules import load_module
from pilotage.types import LossConfig, Sample, SamplingParams, TokenIds

VOCAB_SIZE = 1024
NUM_ROLLOUTS = 32
ROLLOUTS_PER_TASK = 4
NUM_TURNS = 6
SAMPLED_TOKENS = 25
OBSERVED_TOKENS = 60


def make_policy(root: Path) -> Path:
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    root.mkdir()
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(root / "tokenizer.json"))
    return create_policy(root / "policy", config=PolicyConfig(), tokenizer_dir=root, seed=0)


def make_prompts(rng: np.random.Generator) -> list[TokenIds]:
    shared = rng.integers(1, VOCAB_SIZE, 200)
    prompts: list[TokenIds] = []
    for _ in range(NUM_ROLLOUTS // ROLLOUTS_PER_TASK):
        prompt = np.concatenate([shared, rng.integers(1, VOCAB_SIZE, 100)]).astype(np.int32)
        prompts += [prompt] * ROLLOUTS_PER_TASK
    return prompts


def extend(
    prompts: Sequence[TokenIds], sampled: Sequence[TokenIds], rng: np.random.Generator
) -> list[TokenIds]:
    return [
        np.concatenate([prompt, ids, rng.integers(1, VOCAB_SIZE, OBSERVED_TOKENS)]).astype(np.int32)
        for prompt, ids in zip(prompts, sampled, strict=True)
    ]


async def run_embedded(engine: LocalEngine, seed: int) -> float:
    await engine.publish()  # forgets every context of the repeat before
    rng = np.random.default_rng(seed)
    prompts = make_prompts(rng)
    start = time.process_time()
    for turn in range(NUM_TURNS):
        calls = [
            engine.sample(
                prompt, SamplingParams(max_tokens=SAMPLED_TOKENS, seed=i), session_id=str(i), turn_index=turn
            )
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*calls)
        prompts = extend(prompts, [answer.token_ids for answer in answers], rng)
    return time.process_time() - start


def run_transformers(module: Any, seed: int) -> float:
    rng = np.random.default_rng(seed)
    prompts = make_prompts(rng)
    start = time.process_time()
    for _ in range(NUM_TURNS):
        input_ids = torch.from_numpy(np.stack(prompts)).long()  # all of one length here, so nothing is padded
        output = module.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            use_cache=True,
            top_k=0,
            min_new_tokens=SAMPLED_TOKENS,
            max_new_tokens=SAMPLED_TOKENS,
            pad_token_id=0,
        )
        sampled = output[:, input_ids.shape[1] :].numpy().astype(np.int32)
        prompts = extend(prompts, list(sampled), rng)
    return time.process_time() - start


def training_batch(rng: np.random.Generator) -> list[Sample]:
    """32 rollouts of 300 tokens, a quarter of them trained."""
    mask = np.zeros(300, np.bool_)
    mask[225:] = True
    return [
        Sample(
            sequence_id=str(index),
            group_id="g",
            token_ids=rng.integers(1, VOCAB_SIZE, 300).astype(np.int32),
            loss_mask=mask.copy(),
            sampler_logprobs=np.where(mask, -6.9, 0).astype(np.float32),
            advantages=np.where(mask, (-1.0) ** index, 0).astype(np.float32),
            weights_versions=np.where(mask, 0, -1).astype(np.int32),
        )
        for index in range(32)
    ]


async def main(repeats: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        policy = make_policy(Path(root) / "work")
        engine = await LocalEngine.open(
            policy,
            max_context_tokens=1024,
            max_batch=NUM_ROLLOUTS,
            stop_token_ids=[VOCAB_SIZE],
            device="cpu",
        )
        module = load_module(policy, device=torch.device("cpu"))
        batch = training_batch(np.random.default_rng(0))
        embedded: list[float] = []
        generate: list[float] = []
        training: list[float] = []
        for repeat in range(repeats):
            embedded.append(await run_embedded(engine, repeat))
            with torch.inference_mode():
                generate.append(run_transformers(module, repeat))
            start = time.process_time()
            await engine.forward_backward(batch, LossConfig())
            training.append(time.process_time() - start)
        await engine.close()
    tokens = NUM_ROLLOUTS * NUM_TURNS * SAMPLED_TOKENS
    for name, times in (("embedded sampler", embedded), ("transformers generate", generate)):
        median = statistics.median(times)
        print(f"{name:24s} {median:6.2f} CPU-s  {tokens / median:8.0f} tokens/CPU-s  spread {spread(times)}")
    ratios = [slow / fast for slow, fast in zip(generate, embedded, strict=True)]
    print(f"ratio, median of {repeats}       {statistics.median(ratios):6.2f}  spread {spread(ratios)}")
    forwarded = sum(sample.token_ids.size for sample in batch)
    median = statistics.median(training)
    print(f"forward + backward       {median:6.2f} CPU-s  {forwarded / median:8.0f} tokens/CPU-s")


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
