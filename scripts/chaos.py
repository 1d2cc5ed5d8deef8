"""Disturb runs and rollouts in every way that is known, and show that nothing is lost, left or wrong.

    python scripts/chaos.py kills --seed 0 --count 50
    python scripts/chaos.py faults --seed 0 --count 200

`kills` runs small trainings and kills a random process of theirs (SIGKILL) at random moments: driver, worker,
supervisor, terminal, sandbox, service, engine. Each run is started again with the same command until it has
finished, and is then compared with one that nobody disturbed: the same rollouts token for token, the same
weights bit for bit, one record a step, and nothing left on the machine.

`faults` strikes rollouts and runs: policies that fork, flood, forge and pry, agents and verifiers that hang
or write garbage, samplers that fail, connections that fall silent, damaged files, a full disk, no
descriptors, a clock that is set, browsers that are killed.
Each has one expected end: outcome, reward, events, and an honest sibling that notices nothing.

The exit code is 1 where anything was not as it should be.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos import faults, kills


def run_kills(chosen: argparse.Namespace) -> int:
    started = time.monotonic()
    results: list[kills.RunResult] = []
    for result in kills.campaign(chosen.count, seed=chosen.seed, kinds=chosen.kinds, kept=chosen.keep):
        results.append(result)
        for kill in result.kills:
            when = f"{kill.moment}, {kill.rollouts} rollouts on disk"
            print(f"{result.kind:9} killed the {kill.victim:10} at a {when}")
        print(f"{result.kind:9} {len(result.kills)} kills, {result.seconds:.0f} s: {_said(result.faults)}")
        sys.stdout.flush()
    num_kills, num_faults = sum(len(r.kills) for r in results), sum(len(r.faults) for r in results)
    print(f"{len(results)} runs, {num_kills} kills, {num_faults} faults, {time.monotonic() - started:.0f} s")
    return 1 if num_faults else 0


def _said(faults: list[str]) -> str:
    return (
        "as if nobody had disturbed it" if not faults else "".join(f"\n  FAULT {fault}" for fault in faults)
    )


def run_faults(chosen: argparse.Namespace) -> int:
    started = time.monotonic()
    logging.disable(logging.ERROR)  # what is struck complains, as it should
    with tempfile.TemporaryDirectory(prefix="pilotage-faults-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # a register of its own
        judged = asyncio.run(faults.campaign(chosen.count, seed=chosen.seed, root=Path(directory)))
    counts = Counter(each.kind for each in judged)
    bad = Counter(each.kind for each in judged if each.problems)
    print(f"{'fault':32} {'count':>5} {'ok':>5}")
    for kind in sorted(counts):
        print(f"{kind:32} {counts[kind]:>5} {counts[kind] - bad[kind]:>5}")
    for each in judged:
        for problem in each.problems:
            print(f"  FAULT {each.kind}: {problem}")
    print(f"{chosen.count} faults, {bad.total()} not as expected, {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    killing = verbs.add_parser("kills", help="kill processes of runs, which are then resumed")
    killing.add_argument("--count", type=int, default=50, help="kills (%(default)s)")
    killing.add_argument("--seed", type=int, default=0)
    killing.add_argument("--kinds", nargs="+", choices=kills.KINDS, default=kills.ORDER)
    killing.add_argument("--keep", type=Path, metavar="DIR", help="keep what runs with a fault leave here")
    killing.set_defaults(run=run_kills)
    striking = verbs.add_parser("faults", help="strike rollouts and runs with faults drawn from tables")
    striking.add_argument("--count", type=int, default=200, help="faults (%(default)s)")
    striking.add_argument("--seed", type=int, default=0)
    striking.set_defaults(run=run_faults)
    chosen = parser.parse_args()
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
