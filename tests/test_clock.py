"""Time that goes on evenly."""

import time

import pytest

from pilotage.clock import steady_time


def test_a_clock_that_is_set_moves_no_steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steady_time() == pytest.approx(time.time(), abs=5)
    before = steady_time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= steady_time() - before < 5
