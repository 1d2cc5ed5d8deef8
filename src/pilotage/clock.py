"""Seconds since the epoch that go on evenly in a process, whatever is done to the machine's clock."""

import time

_ORIGIN = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the time as the clock said it when the process began, and what has passed since.

    Leases, deadlines and durations use it: a clock that is set, or a machine that slept, moves none of them.
    Over a restart it is as good as the clock is.
    """
    return _ORIGIN + time.monotonic()
