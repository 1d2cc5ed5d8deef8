"""A small kill campaign; scripts/chaos.py runs the whole one."""

import pytest
from tests.chaos.kills import campaign


@pytest.mark.agents
@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_disturbed_them() -> None:
    results = list(campaign(3, seed=3, kinds=["alone"], per_run=3))
    assert [fault for result in results for fault in result.faults] == []
    assert sum(len(result.kills) for result in results) == 3
