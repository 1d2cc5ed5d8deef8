"""One killed run; scripts/chaos.py runs a whole campaign of them."""

import contextlib

import pytest
from tests.chaos.kills import campaign


@pytest.mark.agents
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_runs_end_as_if_nobody_had_disturbed_them() -> None:
    with contextlib.closing(campaign(4, seed=0, kinds=["alone"], per_run=4)) as results:
        result = next(results)
    assert result.kills
    assert result.faults == []
