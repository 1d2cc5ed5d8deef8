"""What speculative look-up could save: the tokens that a round of decoding would give on a run's rollouts.

Before each sampled token, the last N tokens are looked up in what the sampler has seen of the rollout, newest
place first, and the K tokens that followed them there are proposed. Those that were sampled next are
accepted, and one more token comes with every round. Draws follow from seeds, so acceptance is exact. The
figure is an upper bound of the speedup: that of a machine on which K + 1 tokens cost what one costs.

    python benchmarks/bench_lookup.py RUN_DIRECTORY [MOST_ROLLOUTS]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pilotage.loops import RunDirectory, read_rollout

GRAM_SIZES = (1, 2, 3)
PROPOSALS = (2, 4, 8)


def propose(seen: Sequence[int], size: int, most: int) -> list[int]:
    """Return what followed the newest earlier place of the last `size` tokens."""
    gram = list(seen[-size:])
    for start in range(len(seen) - size - 1, -1, -1):
        if list(seen[start : start + size]) == gram:
            return list(seen[start + size : start + size + most])
    return []


def rounds_of(context: list[int], sampled: list[int], size: int, most: int) -> tuple[int, int]:
    """Return (rounds, proposed tokens) that `sampled` would have taken."""
    at = rounds = proposed = 0
    while at < len(sampled):
        draft = propose(context + sampled[:at], size, most)
        accepted = 0
        while accepted < min(len(draft), len(sampled) - at) and draft[accepted] == sampled[at + accepted]:
            accepted += 1
        rounds += 1
        proposed += len(draft)
        at += accepted + 1
    return rounds, proposed


def main() -> None:
    run = RunDirectory(Path(sys.argv[1]))
    most_rollouts = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    trajectories = [read_rollout(file).trajectory for file in run.rollout_files()[:most_rollouts]]
    turns = [
        (trajectory.prompt_ids(index).tolist(), turn.completion_ids.tolist())
        for trajectory in trajectories
        for index, turn in enumerate(trajectory.turns)
    ]
    tokens = sum(len(sampled) for _, sampled in turns)
    print(f"{len(trajectories)} rollouts, {len(turns)} turns, {tokens} sampled tokens")
    print("| look up | propose | tokens a round | proposals accepted |")
    print("|---|---|---|---|")
    for size in GRAM_SIZES:
        for most in PROPOSALS:
            counts = [rounds_of(context, sampled, size, most) for context, sampled in turns]
            rounds, proposed = (sum(part) for part in zip(*counts, strict=True))
            accepted = (tokens - rounds) / max(proposed, 1)
            print(f"| {size} | {most} | {tokens / rounds:.2f} | {accepted:.0%} |")


if __name__ == "__main__":
    main()
