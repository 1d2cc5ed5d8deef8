"""A trial in a container. Runs where there is podman and an image for it:

    PILOTAGE_CONTAINER_IMAGE=localhost/base:1 python -m pytest tests/rollouts/test_containers.py

The image needs bash, python3, tar and a directory /workspace; Harbor removes it after the trial.
"""

import os
import shutil
from pathlib import Path

import pytest
from tests.rollouts.rig import HAND_IN, run_one, write_task

from pilotage.rollouts.runner import RunnerSettings
from pilotage.rollouts.trial import AgentChoice, EnvironmentChoice
from pilotage.types import Outcome

IMAGE = os.environ.get("PILOTAGE_CONTAINER_IMAGE", "")

pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.skipif(not IMAGE or not shutil.which("podman"), reason="needs podman and an image"),
]


async def test_openhands_works_in_a_container_as_in_the_sandbox(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", environment_toml=f'docker_image = "{IMAGE}"\n')
    settings = RunnerSettings(
        trials_directory=tmp_path / "trials",
        workers=0,
        agent=AgentChoice(options={"tools": ("terminal", "localization_finish")}),
        environment=EnvironmentChoice(name="podman"),
        expects_hand_in=True,
    )

    rollout = await run_one(task, ("terminal", {"command": "ls -R"}), HAND_IN, settings=settings)

    assert rollout.failure is None
    assert rollout.outcome == Outcome.COMPLETED
    assert rollout.reward is not None
    assert rollout.reward.value == 1.0
    assert len(rollout.trajectory.turns) == 2
