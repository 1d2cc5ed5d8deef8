"""A small kill campaign; scripts/kill_campaign.py runs the whole one."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_campaign.py"


@pytest.mark.agents
@pytest.mark.slow
def test_nothing_outlives_the_next_start_after_killing_sandbox_thread_and_driver() -> None:
    kinds = ("--kinds", "sandbox", "thread", "driver")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rollouts", "6", "--kills", "3", "--seed", "1", *kinds],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("6 rollouts, 3 kills, 0 leftovers\n")
