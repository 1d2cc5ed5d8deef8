"""Warm starts: the tiny policy of the demo from nothing, or a model that there is by imitation alone.

The tiny policy takes a tokenizer, a copy prior, demonstrations and imitation.
Everything follows from the recipe, its tasks and a seed. Demonstrations are real rollouts by a script (see
`demonstrations`), recorded by the proxy; training reads the recorded ids. In most of them the words are
shuffled first, the same word to the same word throughout, so that a word can only be learnt by copying it.
Reinforcement learning is not part of this.
"""

import asyncio
import itertools
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pilotage.algorithms import to_samples
from pilotage.datasets import issue_of, load_tasks
from pilotage.engine import LocalEngine, PolicyConfig, create_policy
from pilotage.errors import ConfigError
from pilotage.localization import mentioned_names
from pilotage.recipes.config import Recipe
from pilotage.recipes.demonstrations import QUERY_SIZES, DemonstrationSampler
from pilotage.recipes.embedded import open_local
from pilotage.recipes.stack import open_runner
from pilotage.recipes.tiny_tokenizer import write_tokenizer
from pilotage.rendering import CHATML_TEMPLATE, ChatTemplate, TokenizerFile, load_renderer
from pilotage.rollouts.code_search import search_command, search_result
from pilotage.types import (
    AdamParams,
    LossConfig,
    PolicyLoss,
    Reduction,
    RolloutRequest,
    Sample,
    SamplingParams,
    Task,
)

POLICY = PolicyConfig(
    hidden_size=96,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_size=64,
    intermediate_size=288,
    max_position_embeddings=2048,
    rope_theta=100_000.0,
    has_copy_prior=True,
)
ROLLOUTS_PER_TASK = 4
COPY_STEPS = 60
IMITATION_STEPS = 1800
BATCH_SIZE = 16
SHUFFLED = 0.9
"""Share of demonstrations whose words are shuffled."""
COMMON = 0.4
"""A word of at least this share of the demonstrations belongs to the format, not to a task."""
MAX_SEARCHES = 40
"""Searches of one task that the vocabulary is made from. Tasks of one package share its tree, so what one
leaves out another finds; a word that all leave out is spelled in bytes."""
MODEL_STEPS = 60
MODEL_BATCH_SIZE = 8
_MODEL_RATE = 1e-4
_COPY_RATE, _IMITATION_RATE = 1e-3, 2e-3
_BETA2 = 0.98
_LOSS = LossConfig(policy_loss=PolicyLoss.CROSS_ENTROPY, reduction=Reduction.TOKEN_MEAN)

_SCAFFOLD = (
    '{"name": "code_search", "arguments": {"query": "a b"}}',
    '{"name": "localization_finish", "arguments": {"locations": ["a.py"]}}',
    '{"name": "localization_finish", "arguments": {"locations": ["a/b.py::c::d", "a.py"]}}',
    "system\nuser\nassistant\ntool\n a.py::\nno match\n",
)
"""Everything that a call or a template may write around the words of a task."""

type Report = Callable[[str], None]


def _transcript_texts(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield what rollouts of `tasks` may read: each issue, and the hits of searches for names it mentions."""
    for task in tasks:
        issue = (task.path / "instruction.md").read_text(encoding="utf-8")
        yield issue
        for names in _searches(task, mentioned_names(issue_of(issue))):
            command = search_command(" ".join(names))
            assert command is not None
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=task.path / "environment",
                capture_output=True,
                text=True,
                check=True,
            )
            yield search_result(done.stdout)


def _searches(task: Task, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the choices of names that a demonstration may search for; of many, some, by the task's id."""
    sizes = range(1, max(QUERY_SIZES) + 1)
    choices = [choice for size in sizes for choice in itertools.combinations(names, size)]
    return choices if len(choices) <= MAX_SEARCHES else random.Random(task.id).sample(choices, MAX_SEARCHES)


def build_tokenizer(recipe: Recipe, directory: Path) -> int:
    """Write the policy's tokenizer for the recipe's tasks; return the size of its vocabulary."""
    prompt_file = recipe.rollouts.system_prompt_file
    if prompt_file is None:
        raise ConfigError("a warm start needs rollouts.system_prompt_file")
    tools = "".join(f"\ntool {name}(query, locations)" for name in recipe.rollouts.tools)
    tasks = load_tasks([*recipe.tasks.train, *recipe.tasks.held_out])
    texts = [prompt_file.read_text(encoding="utf-8"), tools, *_SCAFFOLD]
    return write_tokenizer(directory, itertools.chain(texts, _transcript_texts(tasks)))


async def collect_demonstrations(recipe: Recipe, tokenizer_dir: Path, trials_directory: Path) -> list[Sample]:
    """Run scripted rollouts of the training tasks and flatten those that were scored."""
    renderer = load_renderer(tokenizer_dir)
    sampler = DemonstrationSampler(renderer, TokenizerFile.load(tokenizer_dir))
    requests = [
        RolloutRequest(
            id=f"demonstration-{position:04d}-{index}",
            group_id=f"demonstration-{position:04d}",
            task=task,
            sampling=SamplingParams(
                max_tokens=256, seed=recipe.loop.seed * 1_000_003 + position * 97 + index
            ),
        )
        for position, task in enumerate(load_tasks(recipe.tasks.train))
        for index in range(ROLLOUTS_PER_TASK)
    ]
    async with open_runner(recipe, sampler, renderer, trials_directory) as runner:
        rollouts = await asyncio.gather(*map(runner.run, requests))
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if len(scored) < len(rollouts) // 2:
        failure = next(rollout.failure for rollout in rollouts if rollout.failure is not None)
        raise ConfigError(f"most demonstrations failed, the first with: {failure.message}")
    return [
        sample
        for rollout in scored
        for sample in to_samples(
            rollout.trajectory, sequence_id=rollout.id, group_id=rollout.group_id, advantage=0.0
        )
    ]


def _supervised(ids: np.ndarray, mask: np.ndarray, name: str) -> Sample:
    zeros = np.zeros(ids.size, np.float32)
    return Sample(
        sequence_id=name,
        group_id=name,
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=zeros,
        advantages=zeros.copy(),
        weights_versions=np.full(ids.size, -1, np.int32),
    )


def copy_batch(vocab: np.ndarray, size: int, rng: np.random.Generator) -> list[Sample]:
    """Return sequences of random three-token phrases in random order; a phrase seen before is predictable."""
    batch: list[Sample] = []
    for index in range(size):
        phrases = rng.choice(vocab, (int(rng.integers(6, 12)), 3))
        order = np.concatenate([rng.permutation(len(phrases)) for _ in range(3)])
        is_known = np.array([phrase in order[:position] for position, phrase in enumerate(order)])
        mask = np.repeat(is_known, 3)
        mask[::3] = False  # which phrase comes next is chance
        batch.append(_supervised(phrases[order].reshape(-1), mask, f"copy-{index}"))
    return batch


def shuffle_words(sample: Sample, words: np.ndarray, rng: np.random.Generator) -> Sample:
    """Return the sample with its words renamed by a random permutation of `words`."""
    renamed = np.arange(int(max(words.max(), sample.token_ids.max())) + 1)
    renamed[words] = rng.permutation(words)
    return _supervised(renamed[sample.token_ids], sample.loss_mask.copy(), sample.sequence_id)


def task_words(samples: Sequence[Sample], tokenizer: TokenizerFile, vocab_size: int) -> list[np.ndarray]:
    """Return the ids of words, one array a kind, without the words that most transcripts hold.

    Kinds: `path/`, `file.py`, `::name`, and the rest. Only words of a kind can stand for one another.
    """
    seen = Counter(token for sample in samples for token in set(sample.token_ids.tolist()))
    kinds: dict[str, list[int]] = {}
    for token in range(vocab_size):
        text = tokenizer.decode([token])
        word = re.fullmatch(r"(::)?[A-Za-z_][A-Za-z0-9_]+(/|\.py)?", text)
        if word is not None and seen[token] < COMMON * len(samples):
            kinds.setdefault(f"{word[1]} {word[2]}", []).append(token)
    return [np.array(tokens) for tokens in kinds.values()]


def _rate(step: int, total: int, peak: float) -> AdamParams:
    warm = min(1.0, (step + 1) / 20)
    return AdamParams(learning_rate=peak * warm * max(0.1, 1 - step / total), beta2=_BETA2)


async def train_warm_start(
    engine: LocalEngine,
    samples: Sequence[Sample],
    tokenizer: TokenizerFile,
    vocab_size: int,
    *,
    seed: int,
    report: Report,
) -> None:
    """Train the policy to copy, then to imitate the demonstrations."""
    rng = np.random.default_rng(seed)
    kinds = task_words(samples, tokenizer, vocab_size)
    vocab = np.concatenate(kinds)
    for step in range(COPY_STEPS):
        result = await engine.forward_backward(copy_batch(vocab, BATCH_SIZE, rng), _LOSS)
        await engine.step(replace(_rate(step, COPY_STEPS, _COPY_RATE), learning_rate=_COPY_RATE))
        if step % 20 == 19:
            report(f"copying: step {step + 1}, loss {result.loss:.3f}")
    for step in range(IMITATION_STEPS):
        batch = [samples[index] for index in rng.choice(len(samples), BATCH_SIZE, replace=False)]
        batch = [_shuffled(sample, kinds, rng) if rng.random() < SHUFFLED else sample for sample in batch]
        result = await engine.forward_backward(batch, _LOSS)
        await engine.step(_rate(step, IMITATION_STEPS, _IMITATION_RATE))
        if step % 50 == 49:
            report(f"imitation: step {step + 1}, loss {result.loss:.3f}")


def _shuffled(sample: Sample, kinds: Sequence[np.ndarray], rng: np.random.Generator) -> Sample:
    for words in kinds:
        sample = shuffle_words(sample, words, rng)
    return sample


async def imitate(engine: LocalEngine, samples: Sequence[Sample], *, seed: int, report: Report) -> None:
    """Train a model that speaks already to imitate the demonstrations: it has to learn their format only."""
    rng = np.random.default_rng(seed)
    for step in range(MODEL_STEPS):
        batch = [samples[index] for index in rng.choice(len(samples), MODEL_BATCH_SIZE, replace=False)]
        result = await engine.forward_backward(batch, _LOSS)
        await engine.step(_rate(step, MODEL_STEPS, _MODEL_RATE))
        if step % 5 == 4:
            report(f"imitation: step {step + 1}, loss {result.loss:.3f}")


async def warm_start(recipe: Recipe, out: Path, *, model: Path | None, report: Report) -> None:
    """Build the policy in the new directory `out`, which appears only when it is whole.

    Args:
        model: a directory with the ChatML template of this project, which learns to imitate; None builds the
            tiny policy.

    Raises:
        ConfigError: `out` exists, the demonstrations cannot be made, or `model` writes calls in another way.
    """
    if out.exists():  # noqa: ASYNC240  # once, before anything runs
        raise ConfigError(f"{out} exists already; remove it, or choose another --out")
    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    tokenizer_dir, initial = model or building / "tokenizer", model or building / "initial"
    vocab_size = 0
    if model is None:
        vocab_size = await asyncio.to_thread(build_tokenizer, recipe, tokenizer_dir)
        report(f"tokenizer: {vocab_size} pieces")
    elif ChatTemplate.load(model).source.strip() != CHATML_TEMPLATE.strip():
        raise ConfigError(f"{model}: demonstrations are written in the ChatML of this project, and no other")
    samples = await collect_demonstrations(recipe, tokenizer_dir, building / "trials")
    report(f"demonstrations: {len(samples)} scripted rollouts")
    if model is None:
        create_policy(initial, config=POLICY, tokenizer_dir=tokenizer_dir, seed=recipe.loop.seed)
    whole = recipe.policy.model_copy(update={"peft_config": None})
    engine = await open_local(recipe.model_copy(update={"policy": whole}), initial, load_renderer(initial))
    try:
        if model is None:
            tokenizer = TokenizerFile.load(initial)
            await train_warm_start(
                engine, samples, tokenizer, vocab_size, seed=recipe.loop.seed, report=report
            )
        else:
            await imitate(engine, samples, seed=recipe.loop.seed, report=report)
        await engine.save(building / "policy")
    finally:
        await engine.close()
    for name in ("optimizer.safetensors", "trainer_state.json"):  # a policy to start from has neither
        (building / "policy" / name).unlink(missing_ok=True)
    made = {"recipe": recipe.name, "seed": recipe.loop.seed, "demonstrations": len(samples)}
    (building / "policy" / "warm_start.json").write_text(json.dumps(made, indent=1) + "\n")
    (building / "policy").rename(out)
    shutil.rmtree(building)
