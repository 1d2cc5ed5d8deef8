"""One gradient of a step of OpenHands-like rollouts, three ways: what sharing prefixes saves.

A sample for each call (every turn with its whole context, as recipes do that keep prompt and completion of
each call), a sample for each rollout (turns merged, rows padded), and the batch as a tree, as the trainer
does it. All three have the same trained tokens and, up to rounding, the same gradient, which is compared.
Each row is the median of its repeats, in turns so that a busy moment hits all alike; calls are run once.

Lengths are those of OpenHands with its default prompt and three tools, 6,000 tokens, an issue of 400 and
turns of 80 sampled and 460 answered, all divided by eight to suit a tiny policy on a CPU: the ratios of
lengths stay.

    python benchmarks/bench_training.py [--hidden 512 --ways merged trl]
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pilotage.engine.gradients import Totals, propagate
from pilotage.engine.logprobs import trained_logprobs, tree_logprobs
from pilotage.engine.micro_batches import passes, samples_of
from pilotage.engine.modules import load_module
from pilotage.engine.prefix_tree import PrefixTree
from pilotage.engine.tree_layers import enable_trees
from pilotage.types import Denominators, LossConfig, PolicyLoss, Sample

SYSTEM, ISSUE, SAMPLED, OUTPUT = 750, 50, 10, 58
"""Tokens: of all rollouts, of a group, and of each turn what is sampled and what the tools answer."""
GROUP_SIZE = 8
BUDGET_TOKENS = 16_384
LOSS = LossConfig(policy_loss=PolicyLoss.GRPO, clip_low=0.2, clip_high=0.2)
WAYS = ("calls", "merged", "trl")
_MODEL = Path(__file__).resolve().parents[1] / "recipes" / "demo" / "policy"


def rollouts(groups: int, turns: int) -> list[Sample]:
    """Return a sample for each rollout."""
    rng = np.random.default_rng(turns)
    system = rng.integers(10, 400, SYSTEM)
    made: list[Sample] = []
    for group in range(groups):
        issue = rng.integers(10, 400, ISSUE)
        for member in range(GROUP_SIZE):
            parts, mask = [system, issue], [np.zeros(SYSTEM + ISSUE, np.bool_)]
            for _ in range(turns):
                parts.append(rng.integers(10, 400, SAMPLED + OUTPUT))
                mask.append(np.arange(SAMPLED + OUTPUT) < SAMPLED)
            loss_mask = np.concatenate(mask)[:-OUTPUT]
            ids = np.concatenate(parts)[:-OUTPUT].astype(np.int32)
            made.append(
                Sample(
                    sequence_id=f"g{group}/{member}",
                    group_id=f"g{group}",
                    token_ids=ids,
                    loss_mask=loss_mask,
                    sampler_logprobs=np.where(loss_mask, np.float32(-5), np.float32(0)),
                    advantages=np.where(loss_mask, np.float32(rng.normal()), np.float32(0)),
                    weights_versions=np.where(loss_mask, np.int32(0), np.int32(-1)),
                )
            )
    return made


def calls_of(sample: Sample) -> list[Sample]:
    """Return a sample for each call of a rollout: its whole context, and what was sampled then."""
    made: list[Sample] = []
    starts = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0) == 1)
    for start in starts:
        end = int(start) + SAMPLED
        mask = np.arange(end) >= start

        def part(values: np.ndarray, mask: np.ndarray = mask, end: int = end) -> np.ndarray:
            return np.where(mask, values[:end], values.dtype.type(0))

        made.append(
            replace(
                sample,
                token_ids=sample.token_ids[:end],
                loss_mask=mask,
                sampler_logprobs=part(sample.sampler_logprobs),
                advantages=part(sample.advantages),
                weights_versions=np.where(mask, np.int32(0), np.int32(-1)),
            )
        )
    return made


def rows_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return micro-batches of padded rows; one of calls may be part of a rollout, which GRPO allows."""
    alone = [replace(sample, sequence_id=str(index)) for index, sample in enumerate(samples)]
    return split(alone, trees=False)


def split(samples: Sequence[Sample], *, trees: bool) -> list[list[Sample]]:
    """Return the samples of each pass."""
    return [samples_of(each) for each in passes(samples, budget_tokens=BUDGET_TOKENS, trees=trees)]


def write_wide(directory: Path, hidden: int) -> None:
    """Write a Qwen3 of eight layers with random weights; the larger, the less of its time is attention."""
    config = AutoConfig.from_pretrained(_MODEL)
    config.update(
        {
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "num_hidden_layers": 8,
            "layer_types": ["full_attention"] * 8,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    shutil.copy(_MODEL / "tokenizer.json", directory)


class Bench:
    """One module for padded rows and one for trees."""

    def __init__(self, model: Path) -> None:
        self.plain = load_module(model, device=torch.device("cpu"))
        self.packed = load_module(model, device=torch.device("cpu"))
        assert enable_trees(self.packed)

    def rows(self, samples: Sequence[Sample], counts: Denominators) -> int:
        """Add the gradient row by row; returns padded tokens."""
        self.plain.zero_grad()
        tokens = 0
        for part in rows_of(samples):
            ids, masks = [s.token_ids for s in part], [s.loss_mask for s in part]
            logprobs = trained_logprobs(self.plain, ids, masks, temperature=1.0)
            _propagate(logprobs, part, counts)
            tokens += len(part) * max(array.size for array in ids)
        return tokens

    def tree(self, samples: Sequence[Sample], counts: Denominators) -> int:
        """Add the gradient of packed trees; returns distinct tokens."""
        self.packed.zero_grad()
        tokens = 0
        for part in split(samples, trees=True):
            tree = PrefixTree.of([s.token_ids for s in part], [s.loss_mask for s in part])
            _propagate(tree_logprobs(self.packed, tree, temperature=1.0), part, counts)
            tokens += tree.num_tokens
        return tokens

    def difference(self, other: PreTrainedModel) -> float:
        """Return how far the tree's gradient is from another module's, as a share of its norm."""
        pairs = [
            (one.grad, two.grad)
            for one, two in zip(other.parameters(), self.packed.parameters(), strict=True)
            if one.grad is not None and two.grad is not None
        ]
        apart = sum(float((one - other).double().square().sum()) for one, other in pairs)
        whole = sum(float(one.double().square().sum()) for one, _ in pairs)
        return (apart / whole) ** 0.5


def _nothing(completions: Sequence[object], **_: object) -> list[float]:
    """Reward everything alike."""
    return [0.0] * len(completions)


class TrlStep:
    """TRL's GRPO loss and its gradient on the same tokens: a row for each rollout, tool output masked."""

    def __init__(self, model: Path) -> None:
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

        from datasets import Dataset

        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        arguments = GRPOConfig(
            output_dir=tempfile.gettempdir(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=GROUP_SIZE,
            num_generations=GROUP_SIZE,
            epsilon=LOSS.clip_high,
            loss_type="dapo",  # a mean over the tokens of the whole batch
            report_to=[],
        )
        self.module = load_module(model, device=torch.device("cpu"))
        self.trainer = GRPOTrainer(
            model=self.module,
            reward_funcs=_nothing,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP_SIZE),
            processing_class=tokenizer,
        )
        self.trainer.current_gradient_accumulation_steps = 1

    def step(self, samples: Sequence[Sample], counts: Denominators) -> int:
        """Add the gradient; returns padded tokens."""
        self.module.zero_grad()
        tokens = 0
        for part in rows_of(samples):
            rows = [torch.from_numpy(np.stack([getattr(sample, name) for sample in part])) for name in _ROWS]
            ids, mask, logprobs, advantages = rows
            inputs = {
                "prompt_ids": ids[:, :1].long(),
                "prompt_mask": torch.ones_like(ids[:, :1]),
                "completion_ids": ids[:, 1:].long(),
                "completion_mask": torch.ones_like(ids[:, 1:]),
                "tool_mask": mask[:, 1:].int(),
                "old_per_token_logps": logprobs[:, 1:],
                "advantages": advantages[:, 1:],
                "num_items_in_batch": torch.tensor(float(counts.trained_tokens)),
            }
            self.trainer.compute_loss(self.module, inputs).backward()
            tokens += ids.numel()
        return tokens


_ROWS = ("token_ids", "loss_mask", "sampler_logprobs", "advantages")


def _propagate(logprobs: torch.Tensor, part: Sequence[Sample], counts: Denominators) -> None:
    propagate(logprobs, part, LOSS, denominators=counts, reference_logprobs_n=None, totals=Totals())


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Run once; returns seconds and what it returned."""
    started = time.perf_counter()
    tokens = work()
    return time.perf_counter() - started, tokens


def measure(
    bench: Bench, trl: TrlStep | None, chosen: Sequence[str], *, turns: int, groups: int, repeats: int
) -> None:
    """Print one line of the table, with how far the tree's gradient is from those of the others."""
    merged = rollouts(groups, turns)
    calls = [call for sample in merged for call in calls_of(sample)]
    counts = Denominators.of(merged)
    known: dict[str, Callable[[], int]] = {
        "calls": lambda: bench.rows(calls, counts),
        "merged": lambda: bench.rows(merged, counts),
        "tree": lambda: bench.tree(merged, counts),
    }
    if trl is not None:
        known["trl"] = lambda: trl.step(merged, counts)
    ways = {name: work for name, work in known.items() if name in {*chosen, "tree"}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    for repeat in range(repeats):
        for name, work in ways.items():
            if name == "calls" and repeat:
                continue
            took, tokens[name] = timed(work)
            seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{turns:5} {groups:3}x{GROUP_SIZE}  {counts.trained_tokens:8}  "
        + "  ".join(f"{name} {tokens[name]:9} tok {medians[name]:8.2f} s" for name in ways)
        + "".join(
            f"   over {name} {medians[name] / medians['tree']:5.2f}x,"
            f" tokens {tokens[name] / tokens['tree']:5.2f}x"
            for name in ways
            if name != "tree"
        )
        + f"   gradients apart: rows {bench.difference(bench.plain):.1e}"
        + (f", trl {bench.difference(trl.module):.1e}" if trl is not None else ""),
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure what sharing prefixes saves in training.")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 10, 30])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--hidden", type=int, help="width of a policy with random weights; default: the demo's"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("calls", "merged"), help="trl needs trl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = _MODEL
        if arguments.hidden is not None:
            model = Path(directory)
            write_wide(model, arguments.hidden)
        bench = Bench(model)
        trl = TrlStep(model) if "trl" in arguments.ways else None
    bench.tree(rollouts(1, 1), Denominators.of(rollouts(1, 1)))  # the first pass pays for allocations
    bench.rows(rollouts(1, 1), Denominators.of(rollouts(1, 1)))
    for turns in arguments.turns:
        measure(bench, trl, arguments.ways, turns=turns, groups=arguments.groups, repeats=arguments.repeats)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
