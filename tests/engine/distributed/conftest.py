from collections.abc import Iterator

import pytest
from tests.engine.distributed.worlds import World


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()
