from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.engine.models import CONFIGS, STOP, write_model

from pilotage.engine import LocalEngine


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in CONFIGS}


@pytest.fixture
async def engine(model_dirs: dict[str, Path]) -> AsyncIterator[LocalEngine]:
    opened = await LocalEngine.open(
        model_dirs["qwen3"], max_context_tokens=256, max_batch=8, stop_token_ids=[STOP], device="cpu"
    )
    yield opened
    await opened.close()
