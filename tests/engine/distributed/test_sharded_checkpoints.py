"""A checkpoint does not remember how many ranks wrote it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.engine.distributed import rank_jobs
from tests.engine.distributed.test_fsdp import ADAM, GSPO
from tests.engine.distributed.worlds import World, one_rank
from tests.engine.test_trainer import batch

from pilotage.engine.adapter_checkpoint import ADAPTER_FILE
from pilotage.engine.checkpoint import OPTIMIZER_FILE, Manifest, read_manifest, write_checkpoint
from pilotage.engine.distributed.fsdp import TrainerOptions
from pilotage.engine.lora import LoraOptions
from pilotage.engine.policy import copy_tokenizer
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import ConfigError, TrainerError

LORA = TrainerOptions(micro_batch_tokens=40, compute_dtype="float32", lora=LoraOptions(rank=4, alpha=8))


def step_in_one_process(
    model_dir: Path, start: Path | None, seed: int, end: Path | None = None
) -> rank_jobs.Weights:
    trainer = TorchTrainer(model_dir, device=torch.device("cpu"), micro_batch_tokens=4096)
    if start is not None:
        trainer.load_state(start)
    trainer.forward_backward(batch(seed), GSPO)
    trainer.step(ADAM)
    if end is not None:

        def write(partial: Path) -> None:
            trainer.save_state(partial)
            copy_tokenizer(model_dir, partial)

        write_checkpoint(end, Manifest(weights_version=1, is_published=True), write)
    return {name: p.detach().numpy().copy() for name, p in trainer.module.named_parameters()}


def assert_equal(got: rank_jobs.Weights, expected: rank_jobs.Weights, *, atol: float = 0) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], atol=atol, rtol=0, err_msg=name)


def test_a_run_moves_from_two_ranks_to_one_and_back(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    model_dir = model_dirs["qwen3"]
    first, second = tmp_path / "first", tmp_path / "second"

    [saved, _] = two_ranks.run(rank_jobs.save, model_dir, batch(1), GSPO, ADAM, first)
    with one_rank():
        loaded, stepped = rank_jobs.resume(model_dir, first, batch(2), GSPO, ADAM, second)
    [(again, last), _] = two_ranks.run(rank_jobs.resume, model_dir, second, batch(3), GSPO, ADAM)

    assert_equal(loaded, saved)  # bit for bit
    assert_equal(again, stepped)
    [uninterrupted, _] = two_ranks.run(rank_jobs.train, model_dir, [batch(1), batch(2), batch(3)], GSPO, ADAM)
    assert_equal(last, uninterrupted.weights, atol=1e-6)
    assert read_manifest(first) == Manifest(weights_version=7, is_published=False)
    assert sorted(path.name for path in first.iterdir()) == sorted(
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "tokenizer.json",
            "trainer_state.json",
        ]
    )


def test_the_embedded_engine_goes_on_from_a_sharded_checkpoint_and_the_other_way_round(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    model_dir = model_dirs["qwen3"]

    two_ranks.run(rank_jobs.save, model_dir, batch(1), GSPO, ADAM, tmp_path / "sharded")
    from_sharded = step_in_one_process(model_dir, tmp_path / "sharded", 2, tmp_path / "embedded")
    [(loaded, last), _] = two_ranks.run(
        rank_jobs.resume, model_dir, tmp_path / "embedded", batch(3), GSPO, ADAM
    )

    assert_equal(loaded, from_sharded)
    [uninterrupted, _] = two_ranks.run(rank_jobs.train, model_dir, [batch(1), batch(2), batch(3)], GSPO, ADAM)
    assert_equal(last, uninterrupted.weights, atol=1e-6)  # moments too: another step would differ by 1e-3


def test_a_checkpoint_never_replaces_another_on_any_rank(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("x")

    errors = two_ranks.run(rank_jobs.save, model_dirs["qwen3"], batch(1), GSPO, ADAM, tmp_path)

    assert all(isinstance(error, TrainerError) and "not empty" in str(error) for error in errors)


def test_with_lora_the_base_is_frozen_and_the_adapter_alone_is_saved(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    model_dir, directory = model_dirs["qwen3"], tmp_path / "adapter"

    [(before, after), _] = two_ranks.run(
        rank_jobs.parameters_after_step, model_dir, batch(1), GSPO, ADAM, LORA
    )
    [published, _] = two_ranks.run(rank_jobs.save, model_dir, batch(1), GSPO, ADAM, directory, LORA)

    adapter = {name for name in before if ".lora_" in name}
    assert len(adapter) == 2 * 7 * 2  # A and B of seven projections of two layers
    for name, value in before.items():
        assert np.array_equal(after[name], value) == (name not in adapter), name
    stored = load_file(directory / ADAPTER_FILE)
    assert set(stored) == {"base_model.model." + name.replace(".default", "") for name in adapter}
    # B started at 0, so after one step B A is what the published weights have more than the base
    name = "layers.1.mlp.down_proj"
    low, up = (stored[f"base_model.model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = before[f"model.{name}.base_layer.weight"] + 8 / 4 * up @ low
    np.testing.assert_allclose(published[f"model.{name}.weight"], expected, atol=1e-6)
    assert not (directory / "model.safetensors").exists()
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4


# peft asks the model under a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_moves_between_numbers_of_ranks_and_peft_reads_it(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    from peft import PeftModel

    from pilotage.engine.modules import load_module

    model_dir, directory = model_dirs["qwen3"], tmp_path / "adapter"
    [saved, _] = two_ranks.run(rank_jobs.save, model_dir, batch(1), GSPO, ADAM, directory, LORA)
    with one_rank():
        loaded, stepped = rank_jobs.resume(model_dir, directory, batch(2), GSPO, ADAM, None, LORA)

    assert_equal(loaded, saved)
    [uninterrupted, _] = two_ranks.run(rank_jobs.train, model_dir, [batch(1), batch(2)], GSPO, ADAM, LORA)
    assert_equal(stepped, uninterrupted.weights, atol=1e-6)
    merged = PeftModel.from_pretrained(load_module(model_dir, device=torch.device("cpu")), directory)
    weights = {name: p.detach().numpy() for name, p in merged.merge_and_unload().named_parameters()}
    assert_equal(weights, saved, atol=1e-6)


def test_an_adapter_is_what_a_lora_trainer_loads(model_dirs: dict[str, Path], two_ranks: World) -> None:
    errors = two_ranks.run(
        rank_jobs.resume, model_dirs["qwen3"], model_dirs["qwen3"], batch(1), GSPO, ADAM, None, LORA
    )

    assert all(isinstance(error, ConfigError) and ADAPTER_FILE in str(error) for error in errors)


def test_moments_are_stored_whole_by_parameter_name(
    model_dirs: dict[str, Path], two_ranks: World, tmp_path: Path
) -> None:
    two_ranks.run(rank_jobs.save, model_dirs["qwen3"], batch(1), GSPO, ADAM, tmp_path / "sharded")
    step_in_one_process(model_dirs["qwen3"], None, 1, tmp_path / "embedded")

    ours, theirs = (load_file(tmp_path / name / OPTIMIZER_FILE) for name in ("sharded", "embedded"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        np.testing.assert_allclose(ours[name], value, atol=1e-6, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_of_no_size_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="positive rank"):
        LoraOptions(rank=rank)
