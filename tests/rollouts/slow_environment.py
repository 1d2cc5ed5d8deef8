"""An environment that takes its time to start, and notes when it did; named in recipes by its path."""

import asyncio
import time
from typing import override

from pilotage.rollouts.host_environment import HostEnvironment

BUILD_S = 0.5


class SlowEnvironment(HostEnvironment):
    """Notes (session, began, ended) of each build, in Unix seconds."""

    builds: list[tuple[str, float, float]] = []  # noqa: RUF012  # of the test's process

    @override
    async def start(self, force_build: bool) -> None:
        began = time.time()
        await asyncio.sleep(BUILD_S)
        await super().start(force_build)
        self.builds.append((self.session_id, began, time.time()))
