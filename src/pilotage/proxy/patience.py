"""Repeats a sampler call through transient faults, so that an agent's own back-off never starts.

Agents wait 8 to 64 seconds between attempts and give up after five; the proxy waits a second.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from pilotage.errors import SamplerError, WeightsChangingError
from pilotage.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the proxy keeps trying before the agent hears of a fault."""

    weights_wait_s: float = 60.0
    """Longest wait for new weights; then 429 with Retry-After."""
    max_attempts: int = 3
    """Sampler calls that may fail for other reasons; then 503."""
    backoff_s: float = 0.25
    """Wait after the first failure; doubles."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be positive, got {self.max_attempts}")


async def sample_patiently(sample: Callable[[], Awaitable[Completion]], patience: Patience) -> Completion:
    """Return the first completion that is whole.

    Raises:
        WeightsChangingError: weights were still changing after `weights_wait_s`.
        SamplerError: the last attempt's error, or at once where it is not retryable.
    """
    deadline = time.monotonic() + patience.weights_wait_s
    num_failures = 0
    while True:
        try:
            return _whole(await sample())
        except WeightsChangingError as error:
            if time.monotonic() + error.retry_after_s > deadline:
                raise
            pause_s = error.retry_after_s
        except SamplerError as error:
            num_failures += 1
            if not error.retryable or num_failures >= patience.max_attempts:
                raise
            pause_s = patience.backoff_s * 2 ** (num_failures - 1)
        await asyncio.sleep(pause_s)


def _whole(completion: Completion) -> Completion:
    """Return `completion`, or raise where a turn could not be trained from it."""
    if completion.token_ids.size == 0:
        raise SamplerError("the sampler returned no token; a completion has at least one")
    if not np.isfinite(completion.logprobs).all():
        raise SamplerError("the sampler returned log-probs that are not finite; the turn cannot be trained")
    return completion
