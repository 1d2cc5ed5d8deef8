"""Kill rollouts in every way and show that nothing outlives the next start.

    python scripts/kill_campaign.py --rollouts 100 --kills 20 --seed 0

Each batch is one driver process with a few OpenHands rollouts, whose policy starts a tmux server and
processes that leave their session, and one victim: the process that runs the agent, a sandbox's first
process, the driver's event-loop thread, or the whole driver (SIGKILL). Then comes what every start does, a
sweep, and nothing may be left: no process in any of the batch's namespaces, no tmux server, terminal, mount,
register entry, or directory. Prints a table; the exit code is 1 where anything was left.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.rollouts.rig import HAND_IN, Turn, policy, request_for, write_task

from pilotage.processes import ProcessIdentity, is_running
from pilotage.rollouts.register import Register, sweep
from pilotage.rollouts.runner import HarborRunner, RunnerSettings
from pilotage.rollouts.third_party import prepare
from pilotage.rollouts.trial import AgentChoice
from pilotage.types import Task

KINDS = ("agent", "sandbox", "thread", "driver")
_UP_TIMEOUT_S = 240.0
_SETTLE_S = 5.0
_DISTURB: Turn = (
    "terminal",
    {"command": "tmux new-session -d -s mess 'sleep 600'; setsid sleep 600 & sleep 600 & sleep 1"},
)


@dataclass(slots=True, kw_only=True)
class BatchResult:
    """What one batch did and left."""

    kind: str
    rollouts: int
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    leftovers: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


async def run_rollouts(task: Task, base: Path, count: int, workers: int) -> None:
    """Be a driver: run `count` rollouts and note how each ended."""
    settings = RunnerSettings(
        trials_directory=base / "trials",
        agent=AgentChoice(options={"tools": ("terminal", "localization_finish")}),
        workers=workers,
        concurrency=count,
    )
    async with policy(_DISTURB, HAND_IN) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:

        async def one(number: int) -> None:
            rollout = await runner.run(request_for(task, f"rollout-{number}"))
            (base / "outcomes" / f"{number}").write_text(rollout.outcome.value)

        await asyncio.gather(*(one(number) for number in range(count)))


def drive(task: Task, base: Path, count: int, workers: int) -> None:
    """Run the rollouts in a thread that dies on SIGUSR1, as a thread of a larger program may."""
    thread = threading.Thread(
        target=lambda: asyncio.run(run_rollouts(task, base, count, workers)), daemon=True
    )

    def kill_thread(_signal: int, _frame: object) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )

    signal.signal(signal.SIGUSR1, kill_thread)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    os._exit(0)


def namespaces(identities: Sequence[ProcessIdentity], held: contextlib.ExitStack) -> set[str]:
    """Return the process namespaces of the batch; `held` keeps their names from being given out again."""
    found: set[str] = set()
    for identity in identities:
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{identity.pid}/ns/pid")
            held.enter_context(path.open("rb"))
            found.add(os.readlink(path))
    return found - {os.readlink("/proc/self/ns/pid")}


def processes_of(base: Path, spaces: set[str]) -> list[str]:
    """Return what runs in one of the namespaces, or names the campaign's directory in its command line."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if os.readlink(entry / "ns" / "pid") in spaces or str(base).encode() in command:
                found.append(f"process {entry.name}: {command.replace(bytes(1), b' ')[:60].decode()}")
    return found


def leftovers(base: Path, spaces: set[str]) -> list[str]:
    """Return everything of a batch that is still on this machine."""
    left = processes_of(base, spaces)
    left += [f"register entry {path.name}" for path in Register().directory.glob("*.json")]
    left += [f"trial directory {path.name}" for path in (base / "trials").glob("*")]
    left += [f"tree {path.name}" for path in (Register().directory / "trees").glob("*")]
    mounts = Path("/proc/mounts").read_text().splitlines()
    left += [f"mount {line.split()[1]}" for line in mounts if str(base) in line]
    return left


def wait_for_sandboxes(count: int, driver: int) -> list[ProcessIdentity]:
    """Wait until `count` sandboxes of the driver are up; returns their processes."""
    deadline = time.monotonic() + _UP_TIMEOUT_S
    while time.monotonic() < deadline:
        held = [holding for holding in Register().holdings() if holding.processes]
        if len(held) >= count:
            return [process for holding in held for process in holding.processes]
        if os.waitpid(driver, os.WNOHANG)[0]:
            raise SystemExit("the driver ended before its sandboxes were up")
        time.sleep(0.05)
    raise SystemExit(f"no {count} sandboxes within {_UP_TIMEOUT_S:g} s")


def strike(kind: str, driver: int, sandboxes: list[ProcessIdentity], rng: random.Random) -> None:
    """Kill the victim."""
    if kind == "sandbox":
        os.kill(rng.choice(sandboxes).pid, signal.SIGKILL)
    elif kind == "thread":
        os.kill(driver, signal.SIGUSR1)
    elif kind == "driver":
        os.kill(driver, signal.SIGKILL)
    else:
        owners = {h.owner.pid for h in Register().holdings() if h.processes} - {driver}
        os.kill(rng.choice(sorted(owners)), signal.SIGKILL)


def run_batch(kind: str, task: Task, base: Path, count: int, rng: random.Random) -> BatchResult:
    """Run one driver with one victim, sweep as the next start does, and look for leftovers."""
    with contextlib.ExitStack() as held:
        return _run_batch(kind, task, base, count, rng, held)


def _run_batch(
    kind: str, task: Task, base: Path, count: int, rng: random.Random, held: contextlib.ExitStack
) -> BatchResult:
    started = time.monotonic()
    for name in ("outcomes", "trials"):
        (base / name).mkdir(parents=True, exist_ok=True)
    driver = os.fork()
    if driver == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what dying threads and sandboxes say is no news
        drive(task, base, count, workers=1 if kind == "agent" else 0)
    sandboxes = wait_for_sandboxes(min(2, count), driver)
    time.sleep(rng.uniform(0.0, 1.0))
    sandboxes = [process for process in sandboxes if is_running(process)] or sandboxes
    spaces = namespaces(sandboxes, held)
    strike(kind, driver, sandboxes, rng)
    os.waitpid(driver, 0)
    sweep()
    deadline = time.monotonic() + _SETTLE_S  # what the kernel still tears down
    left = leftovers(base, spaces)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = leftovers(base, spaces)
    result = BatchResult(kind=kind, rollouts=count, leftovers=left, seconds=time.monotonic() - started)
    for path in (base / "outcomes").iterdir():
        result.outcomes[path.read_text()] = result.outcomes.get(path.read_text(), 0) + 1
        path.unlink()
    return result


def campaign(num_rollouts: int, num_kills: int, seed: int, kinds: Sequence[str] = KINDS) -> list[BatchResult]:
    """Run the whole campaign; every kind of victim comes equally often, in a random order."""
    rng = random.Random(seed)
    order = [kinds[index % len(kinds)] for index in range(num_kills)]
    rng.shuffle(order)
    results: list[BatchResult] = []
    with tempfile.TemporaryDirectory(prefix="pilotage-campaign-") as directory:
        base = Path(directory)
        (base / "run").mkdir()
        os.environ["XDG_RUNTIME_DIR"] = str(base / "run")  # a register of its own
        prepare()
        logging.getLogger("openhands").setLevel(logging.CRITICAL)  # dying sandboxes are the point
        import pilotage.rollouts.conversation  # pyright: ignore[reportUnusedImport]  # once: drivers are forks
        import pilotage.rollouts.openhands_agent  # noqa: F401  # pyright: ignore[reportUnusedImport]

        task = write_task(base / "tasks")
        for index, kind in enumerate(order):
            share = num_rollouts * (index + 1) // num_kills - num_rollouts * index // num_kills
            results.append(run_batch(kind, task, base, share, rng))
            print_row(results[-1])
    return results


def print_row(result: BatchResult) -> None:
    ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items())) or "-"
    left = "; ".join(result.leftovers) or "nothing"
    print(
        f"{result.kind:8} {result.rollouts:3} rollouts  {result.seconds:5.1f} s  {ends:45}  left: {left}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    chosen = parser.parse_args()
    results = campaign(chosen.rollouts, chosen.kills, chosen.seed, chosen.kinds)
    left = sum(len(result.leftovers) for result in results)
    print(f"{sum(r.rollouts for r in results)} rollouts, {len(results)} kills, {left} leftovers")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
