import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.engine.models import STOP, module_logprobs
from tests.engine.test_trainer import batch

from pilotage.engine import LocalEngine
from pilotage.engine.checkpoint import MANIFEST_FILE, Manifest, read_manifest, write_checkpoint
from pilotage.errors import ConfigError, TrainerError
from pilotage.types import AdamParams, LossConfig, SamplingParams

STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1)


async def open_engine(model_dir: Path) -> LocalEngine:
    return await LocalEngine.open(
        model_dir, max_context_tokens=64, max_batch=2, stop_token_ids=[STOP], device="cpu"
    )


async def train(engine: LocalEngine, *seeds: int) -> None:
    for seed in seeds:
        await engine.forward_backward(batch(seed), LossConfig())
        await engine.step(STEP)
        await engine.publish()


async def test_a_resumed_run_goes_on_bit_for_bit(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    uninterrupted, resumed = await open_engine(model_dirs["qwen3"]), await open_engine(model_dirs["qwen3"])
    try:
        await train(uninterrupted, 1, 2)
        await uninterrupted.save(tmp_path / "step-2")
        await train(uninterrupted, 3)

        await resumed.load(tmp_path / "step-2")
        assert await resumed.publish() == 2  # the weights had been published under this number
        await train(resumed, 3)

        assert uninterrupted.weights_version == resumed.weights_version == 3
        await uninterrupted.save(tmp_path / "one")
        await resumed.save(tmp_path / "other")
    finally:
        await uninterrupted.close()
        await resumed.close()
    for name in ("model.safetensors", "optimizer.safetensors", MANIFEST_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


async def test_weights_that_were_saved_before_they_were_published_get_the_next_version(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    engine = await open_engine(model_dirs["qwen3"])
    try:
        await engine.forward_backward(batch(), LossConfig())
        await engine.step(STEP)
        await engine.save(tmp_path / "checkpoint")
        await engine.load(tmp_path / "checkpoint")
        assert await engine.publish() == 1
    finally:
        await engine.close()


async def test_a_checkpoint_is_a_model_directory(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    engine = await open_engine(model_dirs["llama"])
    await train(engine, 1)
    await engine.save(tmp_path / "checkpoint")
    await engine.close()

    reopened = await open_engine(tmp_path / "checkpoint")
    try:
        answer = await reopened.sample(
            np.array([1, 2], np.int32), SamplingParams(max_tokens=4, seed=0), session_id="s", turn_index=0
        )
    finally:
        await reopened.close()
    ids = [1, 2, *answer.token_ids.tolist()]
    expected = module_logprobs(tmp_path / "checkpoint", ids)[1:]
    np.testing.assert_allclose(
        answer.logprobs, expected[np.arange(answer.token_ids.size), answer.token_ids], atol=1e-5
    )


async def test_a_plain_model_directory_loads_with_a_fresh_optimizer(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    fresh, used = await open_engine(model_dirs["qwen3"]), await open_engine(model_dirs["qwen3"])
    try:
        await train(used, 1)
        await used.load(model_dirs["qwen3"])
        assert await used.publish() == 0
        for engine, name in ((fresh, "fresh"), (used, "used")):
            await train(engine, 2)
            await engine.save(tmp_path / name)
    finally:
        await fresh.close()
        await used.close()
    one, other = (tmp_path / name / "model.safetensors" for name in ("fresh", "used"))
    assert one.read_bytes() == other.read_bytes()


def test_a_write_that_fails_leaves_nothing_where_the_checkpoint_would_be(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    manifest = Manifest(weights_version=3, is_published=True)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "checkpoint", manifest, fail)
    assert not (tmp_path / "checkpoint").exists()

    def succeed(directory: Path) -> None:
        (directory / "whole").touch()

    write_checkpoint(tmp_path / "checkpoint", manifest, succeed)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [MANIFEST_FILE, "whole"]
    assert read_manifest(tmp_path / "checkpoint") == manifest


def test_a_checkpoint_never_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "precious").touch()
    with pytest.raises(TrainerError, match="not empty"):
        write_checkpoint(
            tmp_path / "checkpoint", Manifest(weights_version=0, is_published=True), lambda _: None
        )


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text('{"global_step": 4}')
    with pytest.raises(ConfigError, match="not a manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("removed", "named"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")],
)
async def test_an_incomplete_model_directory_is_one_clear_line(
    model_dirs: dict[str, Path], tmp_path: Path, removed: str, named: str
) -> None:
    shutil.copytree(model_dirs["qwen3"], tmp_path / "model")
    (tmp_path / "model" / removed).unlink()
    with pytest.raises(ConfigError, match=f"missing: {named}") as caught:
        await open_engine(tmp_path / "model")
    assert "\n" not in str(caught.value)


async def test_a_directory_that_does_not_exist_or_names_no_stop_is_refused(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        await open_engine(tmp_path / "nowhere")
    shutil.copytree(model_dirs["qwen3"], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        await LocalEngine.open(tmp_path / "model", max_context_tokens=8, max_batch=1, device="cpu")


async def test_a_model_that_transformers_does_not_know_is_refused(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(model_dirs["qwen3"], tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await open_engine(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"\xff" * 64])
async def test_a_damaged_checkpoint_is_one_clear_line(
    model_dirs: dict[str, Path], tmp_path: Path, name: str, damage: bytes
) -> None:
    engine = await open_engine(model_dirs["qwen3"])
    try:
        await engine.save(tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / name).write_bytes(damage)
        with pytest.raises(ConfigError, match="is damaged"):
            await engine.load(tmp_path / "checkpoint")
        # One from before there were digests.
        (tmp_path / "checkpoint" / MANIFEST_FILE).write_text('{"weights_version": 0, "is_published": true}')
        with pytest.raises(ConfigError, match=r"cannot be (loaded|read)") as caught:
            await engine.load(tmp_path / "checkpoint")
        assert "\n" not in str(caught.value)
    finally:
        await engine.close()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4  # of the last tensor: the header stays right
    file.write_bytes(content)


@pytest.mark.parametrize(("lose", "said"), [(flip_a_bit, "is damaged"), (Path.unlink, "is gone")])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
async def test_tensors_that_a_disk_lost_are_missed_before_anything_is_read(
    model_dirs: dict[str, Path], tmp_path: Path, name: str, lose: Callable[[Path], object], said: str
) -> None:
    engine = await open_engine(model_dirs["qwen3"])
    try:
        await train(engine, 1)
        for step in ("earlier", "later"):
            await engine.save(tmp_path / step)
        file = tmp_path / "later" / name
        lose(file)
        with pytest.raises(ConfigError) as caught:
            await engine.load(tmp_path / "later")
        assert str(caught.value).startswith(f"{file} {said}")
        assert "\n" not in str(caught.value)
        if name == "optimizer.safetensors":
            await engine.load(tmp_path / "later", weights_only=True)
        else:
            with pytest.raises(ConfigError, match="later"):  # a run that begins with these weights
                await open_engine(tmp_path / "later")
        await engine.load(tmp_path / "earlier")
    finally:
        await engine.close()


def test_tensors_that_cannot_be_written_leave_no_checkpoint_and_say_why(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").mkdir()
        save_file({"weight": torch.zeros(2)}, directory / "model.safetensors")

    with pytest.raises(TrainerError, match=r"could not be written: .*; mend that, then resume the run"):
        write_checkpoint(tmp_path / "checkpoint", Manifest(weights_version=0, is_published=True), write)
    assert not (tmp_path / "checkpoint").exists()
