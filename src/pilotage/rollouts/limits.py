"""How many trials are in each phase at once, and how fast they start.

    start limit -> slot of set-up -> slot of the agent -> slot of the verifier

A trial holds one slot at most, that of the phase it is in, and gives it back before it asks for the next, so
trials cannot wait for one another in a circle, and a slow build or a slow test holds no agent's slot. Who
waits is served in order. How many trials there are in all is the runner's to bound.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pilotage.rollouts.report import TrialPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """None sets no limit."""

    setup_slots: int | None = None
    """Environments that are built and agents that are installed at once."""
    agent_slots: int | None = None
    """Agents that run at once."""
    verifier_slots: int | None = None
    """Verifiers that run at once."""
    starts_per_s: float | None = None
    """Most trials that start in a second."""

    def pools(self) -> Mapping[TrialPhase, asyncio.Semaphore]:
        """Return new pools, of the phases that are limited."""
        sizes = {
            TrialPhase.ENVIRONMENT: self.setup_slots,
            TrialPhase.AGENT: self.agent_slots,
            TrialPhase.VERIFIER: self.verifier_slots,
        }
        return {phase: asyncio.Semaphore(size) for phase, size in sizes.items() if size is not None}


class Slots(Protocol):
    """A trial's side of the pools."""

    async def enter(self, phase: TrialPhase) -> None:
        """Give back what is held, and wait for a slot of `phase`."""
        ...

    async def leave(self) -> None:
        """Give back what is held."""
        ...


class PoolSlots:
    """Slots of one trial, taken from pools that it shares with others."""

    def __init__(
        self, pools: Mapping[TrialPhase, asyncio.Semaphore], on_waited: Callable[[float], None]
    ) -> None:
        """Take nothing yet; `on_waited` gets the seconds of each wait."""
        self._pools = pools
        self._on_waited = on_waited
        self._held: asyncio.Semaphore | None = None
        self.waited_s: float | None = None
        """In all; None where no phase is limited."""

    @property
    def is_limited(self) -> bool:
        """Whether any phase is."""
        return bool(self._pools)

    async def enter(self, phase: TrialPhase) -> None:
        """See `Slots`."""
        self.release()
        pool = self._pools.get(phase)
        if pool is None:
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        await pool.acquire()
        self._held = pool
        waited_s = loop.time() - started
        self.waited_s = (self.waited_s or 0.0) + waited_s
        self._on_waited(waited_s)

    async def leave(self) -> None:
        """See `Slots`."""
        self.release()

    def release(self) -> None:
        """Do what `leave` does, where nothing can be awaited."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


class StartLimit:
    """Lets trials start one after another, no two closer than the limit allows."""

    def __init__(self, per_s: float | None) -> None:
        self._interval_s = 1 / per_s if per_s is not None else 0.0
        self._next_at = 0.0
        self._turn = asyncio.Lock()  # a start that the loop delays must delay those behind it

    async def wait(self) -> None:
        """Wait for one's turn; turns are given out in the order of the calls."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_at - loop.time())
            self._next_at = loop.time() + self._interval_s
