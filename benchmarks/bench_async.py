"""What it saves to let rollouts go on while the trainer works: the training loop itself, on a virtual clock.

Sampler and trainer are latencies, everything between them is the code that runs live. The sampler has slots
for one step's rollouts, whatever the lag, so that what is gained is idle time and nothing else. A rollout's
seconds are drawn from measured ones (`--run RUN` reads those of a run; else those of `make demo`), or, as a
second case, from a log-normal distribution with the tail of long agent runs, which is assumed. Training takes
a share of the median rollout's time. All runs train the same number of tokens.

    python benchmarks/bench_async.py [--run RUN]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.loops.simulated import Latency, Simulation
from tests.loops.virtual_time import run_simulated

from pilotage.loops import LoopSettings, Stragglers
from pilotage.loops.summaries import read_summaries

DEMO_S = (
    1.81, 2.44, 2.63, 2.74, 2.85, 2.93, 3.0, 3.05, 3.11, 3.15, 3.21, 3.24, 3.27, 3.32, 3.37, 3.41, 3.46, 3.5,
    3.55, 3.59, 3.63, 3.68, 3.73, 3.79, 3.83, 3.88, 3.93, 4.0, 4.06, 4.12, 4.19, 4.26, 4.34, 4.43, 4.53, 4.63,
    4.76, 4.89, 5.06, 5.34, 8.89,
)  # fmt: skip
"""Seconds of 1,920 rollouts of `make demo`, seed 0: from the smallest to the largest, a fortieth apart."""
STEPS, TASKS, GROUP = 30, 8, 8


def measured(run: Path | None) -> Sequence[float]:
    """Return seconds of training rollouts, in order."""
    if run is None:
        return DEMO_S
    lines = [line for folder in (run / "rollouts").glob("step-*") for line in read_summaries(folder)[0]]
    seconds = sorted(line.summary.total_s for line in lines if line.summary.total_s is not None)
    if len(seconds) < 10:
        raise SystemExit(f"{run} has {len(seconds)} timed training rollouts; ten are needed")
    return seconds


def drawn_from(seconds: Sequence[float]) -> Latency:
    """Return a latency with this distribution, linear between its values."""
    return lambda rng: float(np.interp(rng.random() * (len(seconds) - 1), range(len(seconds)), seconds))


def long_tailed(rng: np.random.Generator) -> float:
    """Median 60 s, one in a hundred over 10 minutes."""
    return float(rng.lognormal(np.log(60), 1.0))


def simulate(
    latency: Latency, *, train_s: float, max_lag: int, stragglers: Stragglers
) -> tuple[float, float, float]:
    """Return simulated seconds, mean lag in versions and the share of sampled tokens that were masked."""
    settings = LoopSettings(
        num_steps=STEPS,
        tasks_per_step=TASKS,
        group_size=GROUP,
        max_lag=max_lag,
        stragglers=stragglers,
        checkpoint_every_steps=STEPS,
    )
    simulation = Simulation(settings=settings, latency=latency, train_s=train_s, concurrency=TASKS * GROUP)
    with tempfile.TemporaryDirectory() as directory:
        records, took_s = run_simulated(simulation.run(Path(directory) / "run"))
    steps = records[1:]
    sampled = sum(record["ledger/sampled_tokens"] for record in steps)
    masked = sum(record["ledger/masked_tokens"] for record in steps)
    assert sampled == STEPS * TASKS * GROUP * 5
    return took_s, float(np.mean([record["lag/mean_versions"] for record in steps])), masked / sampled


def main() -> None:
    """Print a line for each latency, training time, lag and policy."""
    parser = argparse.ArgumentParser(description="Compare synchronous and asynchronous training on a clock.")
    parser.add_argument("--run", type=Path, help="a run directory whose rollouts were timed")
    seconds = measured(parser.parse_args().run)
    started = time.monotonic()
    cases: tuple[tuple[str, Latency], ...] = (("measured", drawn_from(seconds)), ("long tail", long_tailed))
    print(f"{STEPS} steps of {TASKS} x {GROUP} rollouts, {TASKS * GROUP} at once")
    for name, latency in cases:
        median = float(np.median([latency(np.random.default_rng(seed)) for seed in range(999)]))
        for share in (0.1, 0.5, 1.0):
            synchronous_s = 0.0
            for max_lag, stragglers in (
                (0, Stragglers.WAIT),
                (1, Stragglers.WAIT),
                (2, Stragglers.WAIT),
                (2, Stragglers.MASK),
                (4, Stragglers.WAIT),
            ):
                took_s, lag, masked = simulate(
                    latency, train_s=share * median, max_lag=max_lag, stragglers=stragglers
                )
                synchronous_s = took_s if max_lag == 0 else synchronous_s
                gain = f"{synchronous_s / took_s:4.2f}x  mean lag {lag:4.2f}  masked {masked:5.1%}"
                print(
                    f"{name:10} training {share:3.1f} of a rollout's median  lag {max_lag} {stragglers:5}"
                    f" {took_s:8.0f} s  {gain}",
                    flush=True,
                )
    print(f"simulated in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
