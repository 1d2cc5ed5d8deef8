"""What a process that runs trials one after another still holds after them."""

import gc
import logging
import os
from pathlib import Path

import pytest
from tests.rollouts.rig import HAND_IN, policy, request_for, write_task

from pilotage.rollouts.runner import HarborRunner, RunnerSettings

pytestmark = pytest.mark.agents


def num_handlers() -> int:
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.Logger.manager.loggerDict))]
    return sum(len(logger.handlers) for logger in loggers)


def open_files() -> list[str]:
    gc.collect()
    found: list[str] = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.append(os.readlink(entry.path))
        except OSError:  # the descriptor of this very listing
            continue
    return sorted(name for name in found if name.startswith("/"))


async def test_trials_leave_no_log_handler_and_no_open_file(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks")
    settings = RunnerSettings(trials_directory=tmp_path / "trials", workers=0)
    async with policy(HAND_IN) as proxy, HarborRunner(sessions=proxy, settings=settings) as runner:
        await runner.run(request_for(task, "first"))  # imports, which may open what stays
        before = num_handlers(), open_files()
        for number in range(3):
            rollout = await runner.run(request_for(task, f"rollout-{number}"))
            assert rollout.failure is None
        assert (num_handlers(), open_files()) == before
