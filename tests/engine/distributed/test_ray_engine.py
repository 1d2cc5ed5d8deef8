"""A small Ray cluster on this machine: two trainer ranks and two samplers are the embedded engine."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file
from tests.engine.distributed.test_fsdp import ADAM, GSPO
from tests.engine.models import STOP, module_logprobs
from tests.engine.test_trainer import batch

from pilotage.engine import LocalEngine
from pilotage.engine.checkpoint import read_manifest
from pilotage.engine.distributed.fsdp import TrainerOptions
from pilotage.engine.distributed.ray_engine import ClusterConfig, RayEngine
from pilotage.errors import ConfigError, ContextExceededError, TrainerError
from pilotage.types import LossConfig, SamplingParams, token_ids

pytestmark = pytest.mark.slow

PROMPT = token_ids([1, 2, 3])
OPTIONS = TrainerOptions(micro_batch_tokens=40, compute_dtype="float32")
PAIR = ClusterConfig(
    trainer_ranks=2,
    sampler_replicas=2,
    device="cpu",
    max_context_tokens=64,
    max_batch=4,
    stop_token_ids=(STOP,),
    trainer=OPTIONS,
)


def processes_of(directory: Path) -> list[int]:
    """Processes whose command line names the cluster's directory."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in command and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster in a directory of its own, whose path is short enough for sockets; nothing of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    ray.init(
        num_cpus=4,
        num_gpus=0,
        object_store_memory=100 * 1024 * 1024,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(directory),
    )
    assert processes_of(directory)
    yield
    ray.shutdown()
    assert processes_of(directory) == []
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def model_dir(model_dirs: dict[str, Path]) -> Path:
    return model_dirs["qwen3"]


@pytest.fixture
async def engine(cluster: None, model_dir: Path) -> AsyncIterator[RayEngine]:
    opened = await RayEngine.open(model_dir, PAIR)
    yield opened
    await opened.close()


async def test_a_cluster_is_the_embedded_engine_and_survives_a_lost_sampler_but_no_lost_rank(
    engine: RayEngine, model_dir: Path, tmp_path: Path
) -> None:
    local = await LocalEngine.open(
        model_dir, max_context_tokens=64, max_batch=4, stop_token_ids=[STOP], device="cpu"
    )
    try:
        for seed in (1, 2):
            ours = await engine.forward_backward(batch(seed), GSPO)
            theirs = await local.forward_backward(batch(seed), GSPO)
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
            assert (await engine.step(ADAM)).grad_norm == pytest.approx(
                (await local.step(ADAM)).grad_norm, rel=1e-4
            )
            assert await engine.publish() == await local.publish() == engine.weights_version == seed
        await engine.save(tmp_path / "cluster")
        await local.save(tmp_path / "local")
        await agree_when_sampling(engine, local, tmp_path)
        await keep_their_sessions(engine)
        await lose_a_sampler(engine)
        await lose_a_rank(engine)
        await engine.close()  # the fixture closes it again
    finally:
        await local.close()


async def agree_when_sampling(engine: RayEngine, local: LocalEngine, tmp_path: Path) -> None:
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("cluster", "local"))
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], atol=1e-6, rtol=0, err_msg=name)
    assert read_manifest(tmp_path / "cluster") == read_manifest(tmp_path / "local")
    params = SamplingParams(max_tokens=12, seed=5)
    answer = await engine.sample(PROMPT, params, session_id="s", turn_index=0)
    expected = await local.sample(PROMPT, params, session_id="s", turn_index=0)
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    assert answer.weights_versions.tolist() == expected.weights_versions.tolist()
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
    rows = module_logprobs(tmp_path / "cluster", [*PROMPT.tolist(), *answer.token_ids.tolist()])
    size = answer.token_ids.size
    np.testing.assert_allclose(answer.logprobs, rows[2:][np.arange(size), answer.token_ids], atol=1e-5)


async def keep_their_sessions(engine: RayEngine) -> None:
    """Errors of ours cross the cluster as what they are, and a cancelled call leaves nothing behind."""
    with pytest.raises(ContextExceededError, match="context window 64"):
        await engine.sample(token_ids([1] * 64), SamplingParams(), session_id="s", turn_index=1)
    await engine.forward_backward(batch(9), GSPO)
    await engine.discard()
    with pytest.raises(TrainerError, match="no gradient was accumulated"):
        await engine.step(ADAM)
    with pytest.raises(ConfigError, match="not a directory"):
        await engine.load(Path("/nowhere"))
    call = asyncio.create_task(
        engine.sample(PROMPT, SamplingParams(max_tokens=60, seed=2), session_id="t", turn_index=0)
    )
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(await engine.forward(batch(3), temperature=1.0)) == len(batch(3))


async def lose_a_sampler(engine: RayEngine) -> None:
    params = SamplingParams(max_tokens=4, seed=1)
    answers = [
        (await engine.sample(PROMPT, params, session_id=name, turn_index=0)).token_ids.tolist()
        for name in ("a", "b", "c")
    ]
    ray.kill(engine._replicas[0])
    again = [
        (await engine.sample(PROMPT, params, session_id=name, turn_index=0)).token_ids.tolist()
        for name in ("a", "b", "c")
    ]
    assert again == answers
    assert await engine.publish() == 3


async def train_for_ever(engine: RayEngine) -> None:
    while True:
        await engine.forward_backward(batch(1), LossConfig())


async def lose_a_rank(engine: RayEngine) -> None:
    ray.kill(engine._ranks[1])
    async with asyncio.timeout(30):
        with pytest.raises(TrainerError, match=r"the engine is lost: .*last checkpoint"):
            await train_for_ever(engine)  # a rank is killed a moment after it was asked for
    with pytest.raises(TrainerError, match="the engine is lost"):
        await engine.step(ADAM)
    with pytest.raises(TrainerError, match="the engine is lost"):
        await engine.sample(PROMPT, SamplingParams(), session_id="s", turn_index=0)


async def test_a_cluster_without_the_devices_is_refused_in_time(cluster: None, model_dir: Path) -> None:
    config = ClusterConfig(
        trainer_ranks=8,
        device="cpu",
        max_context_tokens=64,
        max_batch=4,
        trainer=OPTIONS,
        stop_token_ids=(STOP,),
        placement_timeout_s=1.0,
    )
    with pytest.raises(ConfigError, match=r"did not place .*'CPU': 9.* free"):
        await RayEngine.open(model_dir, config)
    assert ray.is_initialized()  # a cluster that was there stays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer_ranks": 0}, "needs a trainer and a sampler"),
        ({"shares_gpus": True, "trainer_ranks": 2}, "as many replicas"),
        ({"shares_gpus": True, "device": "cpu"}, "CUDA"),
    ],
)
def test_a_config_that_cannot_be_placed_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(max_context_tokens=8, max_batch=1, trainer=OPTIONS, **changes)  # pyright: ignore
