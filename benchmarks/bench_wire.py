"""Our DSSST1 codec against the public client's, in MB/s, on a training batch of 64 x 40,960 tokens.

    python benchmarks/bench_wire.py PYTHON_WITH_CORTEX_TRAINING [REPEATS]

The batch holds int64 ids and position ids, float32 advantages and old log-probs, and a bool mask.
The public codec runs in a process of its own, because it needs torch; the two take turns, one repeat each,
in the same run. Their frames are the same bytes. "decode and read" also sums every array once with its own
library, because our decoder copies nothing: the arrays are views of the frame. Times are CPU seconds: another
program on the machine then costs both alike. Prints a Markdown table.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROWS, TOKENS = 64, 40_960
PHASES = ("encode", "decode", "decode and read")


def measure(
    encode: Callable[[], bytes], decode: Callable[[bytes], Any], total: Callable[[Any], float]
) -> str:
    """Return CPU seconds of the three phases, as text for the parent process."""
    started = time.process_time()
    frame = encode()
    encoded = time.process_time()
    tree = decode(frame)
    decoded = time.process_time()
    for array in (*tree["kwargs"].values(), *tree["context"].values()):
        total(array)
    read = time.process_time()
    return f"{encoded - started} {decoded - encoded} {read - encoded}"


def make_batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (ROWS, TOKENS)
    ids = rng.integers(0, 150_000, shape)
    return {
        "args": (),
        "kwargs": {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(TOKENS), shape).copy()},
        "context": {
            "advantages": rng.standard_normal(shape, np.float32),
            "loss_mask": rng.random(shape) < 0.3,
            "old_log_probs_shifted": -rng.random(shape, np.float32),
        },
        "processing": {"loss_fn": "grpo", "config": {"eps_clip": 0.2}, "post": []},
    }


def serve_stock(batch_file: Path) -> None:
    """Answer each line of standard input with one measurement of the public codec."""
    import torch
    from cortex_training import wire  # pyright: ignore[reportMissingImports]

    def total(tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    torch.set_num_threads(1)
    batch = wire.loads(batch_file.read_bytes())
    for _ in sys.stdin:
        print(measure(lambda: wire.dumps(batch), wire.loads, total), flush=True)  # pyright: ignore[reportUnknownLambdaType]


def main(stock_python: str, repeats: int) -> None:
    from pilotage.wire.frames import decode_frame, encode_frame

    batch = make_batch()
    frame = encode_frame(batch)
    times: dict[str, list[list[float]]] = {"ours": [], "stock": []}
    with tempfile.TemporaryDirectory() as root:
        batch_file = Path(root) / "batch"
        batch_file.write_bytes(frame)
        command = [stock_python, __file__, "--serve", str(batch_file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stock:
            assert stock.stdin
            assert stock.stdout
            for repeat in range(repeats + 1):
                stock.stdin.write("go\n")
                stock.stdin.flush()
                theirs = stock.stdout.readline()
                ours = measure(lambda: encode_frame(batch), decode_frame, lambda array: float(array.sum()))
                if repeat:  # the first one warms both up
                    times["stock"].append([float(each) for each in theirs.split()])
                    times["ours"].append([float(each) for each in ours.split()])
            stock.stdin.close()
    report(times, len(frame) / 1e6)


def report(times: dict[str, list[list[float]]], megabytes: float) -> None:
    print(f"{megabytes:.0f} MB a frame, medians of {len(times['ours'])} (range)\n")
    print("| | ours MB/s | stock MB/s | ratio |")
    print("|---|---|---|---|")
    for phase, name in enumerate(PHASES):
        ours, stock = (
            [megabytes / max(each[phase], 1e-6) for each in times[who]] for who in ("ours", "stock")
        )
        ratios = [mine / theirs for mine, theirs in zip(ours, stock, strict=True)]
        print(f"| {name} | {spread(ours, 0)} | {spread(stock, 0)} | {spread(ratios, 1)} |")


def spread(values: Sequence[float], digits: int) -> str:
    median, low, high = (
        f"{each:,.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} to {high})"


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve_stock(Path(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 9)
