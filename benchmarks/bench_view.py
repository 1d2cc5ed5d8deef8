"""How fast `pilotage view` is on a run of 100 steps x 64 rollouts of 40,000 tokens.

Makes the run in a temporary directory (or in --runs DIR, to look at it), then asks the page over HTTP, cold
and with the index that the first round left.

    python benchmarks/bench_view.py [--steps 100] [--groups 8] [--group-size 8] [--tokens 40000]
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import orjson
import tomli_w

from pilotage.algorithms import build_batch
from pilotage.files import append_line
from pilotage.loops import LoopSettings, RunDirectory, TrainedGroups
from pilotage.ops.view.library import Library
from pilotage.ops.view.serving import open_viewer
from pilotage.rendering import load_renderer
from pilotage.types import (
    BranchCause,
    FinishReason,
    Message,
    Outcome,
    Reward,
    Role,
    Rollout,
    RolloutFailure,
    SamplingParams,
    Trajectory,
    Turn,
)

_POLICY = Path(__file__).resolve().parent.parent / "recipes" / "demo" / "policy"
_TURNS = 10
_WORDS = ("the", "parser", "returns", "early", "when", "a", "header", "never", "sees", "its", "end")


def make_run(
    path: Path, *, steps: int, groups: int, group_size: int, tokens: int, policy: Path = _POLICY
) -> None:
    """Write a run: real ids of the demo's tokenizer, made-up words, every outcome now and then."""
    rng = np.random.default_rng(0)
    (path / "errors").mkdir(parents=True)
    loop = {"num_steps": steps, "tasks_per_step": groups, "group_size": group_size}
    config = {"name": path.name, "backend": "local", "policy": {"model": str(policy)}, "loop": loop}
    (path / "config.toml").write_text(tomli_w.dumps(config))
    run = RunDirectory(path)
    run.event("started")
    templates = [_turns(rng, policy, tokens) for _ in range(4)]
    start = time.time() - 600 * steps
    for step in range(1, steps + 1):
        rollouts: list[Rollout] = []
        for group in range(groups):
            for index in range(group_size):
                turns = templates[int(rng.integers(len(templates)))]
                rollout = _rollout(rng, step, group, index, turns, start + 600 * step)
                rollouts.append(rollout)
                run.add_rollout(f"step-{step:04d}", rollout)
        names = sorted({rollout.group_id for rollout in rollouts})
        run.write_trained(TrainedGroups(step=step, trainer_version=0, groups=names))
        samples = build_batch(rollouts, LoopSettings.model_validate(loop).batch_rules()).samples
        sampler = np.concatenate([sample.sampler_logprobs[sample.loss_mask] for sample in samples])
        noise = rng.normal(0, 2e-3, sampler.size).astype(np.float32)
        run.write_trainer_logprobs(step, samples, sampler + noise)
        rewards = [rollout.reward.value for rollout in rollouts if rollout.reward is not None]
        append_line(path / "metrics.jsonl", _record(rng, step, rewards, groups, tokens))
    run.event("finished", step=steps)


def _turns(rng: np.random.Generator, policy: Path, tokens: int) -> tuple[Turn, ...]:
    """Ten turns that together hold `tokens` ids; the last but one branches off."""
    renderer = load_renderer(policy)
    each = tokens // _TURNS // 2
    turns: list[Turn] = []
    for index in range(_TURNS):
        words = " ".join(rng.choice(_WORDS, each))
        role = Role.TOOL if index else Role.USER
        opening = [Message(role=Role.SYSTEM, content="Find the bug.")] if not index else []
        message = Message(role=role, content=words)
        if index:
            context = renderer.render_suffix(2, [message], [])[:each]
        else:
            context = renderer.render_prompt([*opening, message], [])[:each]
        call = '{"name": "code_search", "arguments": {"query": "' + " ".join(rng.choice(_WORDS, each)) + '"}}'
        said = renderer.render_suffix(2, [Message(role=Role.ASSISTANT, content=call)], [])
        completion = np.concatenate([[3], said[4 : each + 2], [4, 2]]).astype(np.int32)
        turns.append(
            Turn(
                parent=None if index == 0 else index - 1 if index < _TURNS - 1 else index - 2,
                branch_cause=BranchCause.HISTORY_REWRITTEN if index == _TURNS - 1 else None,
                context_ids=context.copy(),
                completion_ids=completion,
                logprobs=-rng.exponential(0.6, completion.size).astype(np.float32),
                weights_versions=np.zeros(completion.size, np.int32),
                finish_reason=FinishReason.STOP,
                sampling=SamplingParams(),
                called_tools=("code_search",),
                started_at=0.0,
                finished_at=1.0,
            )
        )
    return tuple(turns)


def _rollout(
    rng: np.random.Generator, step: int, group: int, index: int, turns: tuple[Turn, ...], start: float
) -> Rollout:
    name = f"step-{step:04d}-{group:02d}"
    outcome = Outcome.COMPLETED if rng.random() < 0.85 else list(Outcome)[int(rng.integers(13))]
    has_reward = outcome in list(Outcome)[:6]
    reward = float(np.clip(rng.normal(0.5 + step / 80, 0.6), 0, 3).round(1))
    at = start + 30 * rng.random()
    moved: list[Turn] = []
    for turn in turns:
        seconds = float(rng.exponential(8))
        moved.append(replace(turn, started_at=at, finished_at=at + seconds))
        at += seconds + float(rng.exponential(4))
    failure = None if has_reward else RolloutFailure(where="agent", message="it was lost", advice="look")
    return Rollout(
        id=f"{name}-{index:02d}",
        group_id=name,
        task_id=f"train/package-{(step * 7 + group) % 160:04d}",
        attempt=0,
        outcome=outcome,
        reward=Reward(value=reward, key="reward", source="verifier/reward.json") if has_reward else None,
        trajectory=Trajectory(turns=tuple(moved)),
        failure=failure,
        timings_s={"environment": 2.0, "agent": at - start, "verifier": 3.0, "total": at - start + 6.0},
        counters={"requests": len(turns), "malformed_calls": int(rng.random() < 0.05)},
        facts={"hand_in": "{}", "stop_reason": "finished"},
    )


def _record(rng: np.random.Generator, step: int, rewards: list[float], groups: int, tokens: int) -> bytes:
    sampled = len(rewards) * tokens // 2
    record: dict[str, float] = {
        "step": step,
        "weights_version": step + 1,
        "reward/mean": float(np.mean(rewards)),
        "reward/count": len(rewards),
        "group/count": groups,
        "group/trained": groups,
        "ledger/sampled_tokens": sampled,
        "ledger/trained_tokens": sampled,
        "ledger/masked_tokens": 0,
        "ledger/dropped_tokens": 0,
        "proxy/malformed_calls": int(rng.integers(4)),
        "policy/logprob_gap_mean": 2e-3,
        "policy/logprob_gap_max": float(rng.exponential(0.1)),
        "time/rollouts_s": 300.0,
        "time/train_s": 200.0,
        "time/step_s": 510.0,
    }
    return orjson.dumps(record)


async def measure(runs: Path, steps: int) -> None:
    """Print what each page takes: first with no index, then until all is read, then again."""
    name = next(iter(Library(runs).runs())).name
    last = f"step-{steps:04d}"
    pages = {
        "runs": "/",
        "run": f"/runs/{name}",
        "step": f"/runs/{name}/steps/{last}",
        "rollouts": f"/runs/{name}/rollouts",
        "filtered": f"/runs/{name}/rollouts?outcome=stuck&lowest=0.5&order=-reward",
        "rollout": f"/runs/{name}/rollouts/{last}-00-01",
        "tokens": f"/runs/{name}/rollouts/step-0001-01-01?view=tokens",
        "text search": f"/runs/{name}/rollouts?folder={last}&text=never+sees",
    }
    for label in ("no index", "index on disk"):
        async with open_viewer(Library(runs)) as viewer:
            app = viewer.app(key=None, is_loopback=True)
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60
            ) as client:
                print(f"{label}:")
                for page, address in pages.items():
                    seconds: list[float] = []
                    size = 0.0
                    for _ in range(1 if label == "no index" else 5):
                        started = time.perf_counter()
                        answer = await client.get(address)
                        answer.raise_for_status()
                        seconds.append(time.perf_counter() - started)
                        size = len(answer.content) / 1e6
                    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
                    print(f"  {page:12} {statistics.median(seconds):6.2f} s  ({spread})  {size:6.2f} MB")
                if label == "no index":
                    await _until_read(client, name)


async def _until_read(client: httpx.AsyncClient, name: str) -> None:
    started = time.perf_counter()
    for _ in range(3600):
        if "read so far" not in (await client.get(f"/runs/{name}/rollouts")).text:
            break
        await asyncio.sleep(1)
    print(f"  everything read after {time.perf_counter() - started:.0f} s more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--runs", type=Path, help="keep the run in this directory; used again where it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch) / "runs"
        os.environ["XDG_CACHE_HOME"] = scratch
        if not (runs / "synthetic").is_dir():
            started = time.perf_counter()
            make_run(
                runs / "synthetic",
                steps=arguments.steps,
                groups=arguments.groups,
                group_size=arguments.group_size,
                tokens=arguments.tokens,
            )
            print(f"made the run in {time.perf_counter() - started:.0f} s")
        asyncio.run(measure(runs, arguments.steps))


if __name__ == "__main__":
    main()
