"""Every kind of fault once; scripts/chaos.py runs as many as one likes."""

import random
from pathlib import Path

import pytest
from tests.chaos.faults import campaign, draw
from tests.chaos.run_faults import KINDS as RUN_KINDS
from tests.chaos.trial_faults import KINDS as TRIAL_KINDS


def test_a_campaign_that_is_long_enough_has_every_kind_of_fault() -> None:
    kinds = [*RUN_KINDS, *TRIAL_KINDS]
    assert sorted(draw(len(kinds), random.Random(1))) == sorted(kinds)
    assert draw(200, random.Random(2)) == draw(200, random.Random(2)) != draw(200, random.Random(3))


@pytest.mark.agents
@pytest.mark.slow
async def test_faults_end_as_they_should_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    judged = await campaign(len(RUN_KINDS) + len(TRIAL_KINDS), seed=5, root=tmp_path)
    assert [f"{each.kind}: {problem}" for each in judged for problem in each.problems] == []
