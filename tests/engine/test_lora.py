"""LoRA on the local engine, against peft's own model and its autograd."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.engine.models import STOP, module_logprobs
from tests.engine.test_prefix_tree import rollouts
from tests.engine.test_trainer import batch
from torch import Tensor

from pilotage.engine import LocalEngine
from pilotage.engine.adapter_checkpoint import ADAPTER_FILE, CONFIG_FILE
from pilotage.engine.checkpoint import MANIFEST_FILE, OPTIMIZER_FILE
from pilotage.engine.lora import LoraOptions, trained_weights
from pilotage.engine.modules import load_module
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import ConfigError
from pilotage.types import AdamParams, LossConfig, PolicyLoss, Reduction, Sample, SamplingParams

CPU = torch.device("cpu")
STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1)
LORA = LoraOptions(rank=4, alpha=8, seed=7)
WITH_HEAD = LoraOptions(rank=4, alpha=8, target_modules=("q_proj", "down_proj", "lm_head"))
GRPO = LossConfig(policy_loss=PolicyLoss.GRPO, reduction=Reduction.TOKEN_MEAN, clip_low=0.2, clip_high=0.2)
GSPO = LossConfig(policy_loss=PolicyLoss.GSPO, reduction=Reduction.SEQUENCE_MEAN, clip_low=0.2, clip_high=0.3)

# peft asks the model under a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def trainer_of(model_dir: Path, lora: LoraOptions = LORA, *, micro_batch_tokens: int = 4096) -> TorchTrainer:
    return TorchTrainer(model_dir, device=CPU, micro_batch_tokens=micro_batch_tokens, lora=lora)


def stepped(trainer: TorchTrainer, *seeds: int) -> TorchTrainer:
    for seed in seeds:
        trainer.forward_backward(batch(seed), LossConfig())
        trainer.step(STEP)
    return trainer


def adapter_of(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trained_weights(trainer.module).items()}


def gradient_of(trainer: TorchTrainer) -> Tensor:
    weights = trained_weights(trainer.module).values()
    return torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])


def peft_model(model_dir: Path, directory: Path) -> Any:
    """What stock peft makes of an adapter directory, on the module as transformers loads it."""
    return PeftModel.from_pretrained(load_module(model_dir, device=CPU), directory, is_trainable=True).eval()


def literal_loss(model: Any, samples: list[Sample], config: LossConfig) -> Tensor:
    """GRPO by tokens or GSPO by sequences, as the papers write them."""
    rollouts: dict[str, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.sequence_id, []).append(sample)
    losses: list[Tensor] = []
    for branches in rollouts.values():
        log_ratios, advantages = [], []
        for branch in branches:
            ids = torch.from_numpy(branch.token_ids).long()
            scores = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].double(), -1)
            mask = torch.from_numpy(branch.loss_mask[1:].copy())
            chosen = scores[torch.arange(ids.numel() - 1), ids[1:]][mask]
            log_ratios.append(chosen - torch.from_numpy(branch.sampler_logprobs[branch.loss_mask]))
            advantages.append(torch.from_numpy(branch.advantages[branch.loss_mask]).double())
        log_ratio, advantage = torch.cat(log_ratios), torch.cat(advantages)
        ratio = log_ratio.exp()
        if config.policy_loss is PolicyLoss.GSPO:
            ratio = log_ratio.mean().exp().expand(log_ratio.numel())
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        losses.append(-torch.minimum(ratio * advantage, bounded * advantage))
    if config.reduction is Reduction.TOKEN_MEAN:
        return torch.cat(losses).mean()
    return torch.stack([loss.mean() for loss in losses]).mean()


@pytest.mark.parametrize("loss", [GRPO, GSPO], ids=["grpo", "gspo"])
@pytest.mark.parametrize("lora", [LORA, WITH_HEAD], ids=["all-linear", "with-head"])
def test_the_gradient_is_that_of_pefts_own_forward_pass(
    model_dirs: dict[str, Path], tmp_path: Path, loss: LossConfig, lora: LoraOptions
) -> None:
    trainer = stepped(trainer_of(model_dirs["qwen3"], lora), 1)  # so that B is not 0 any more
    trainer.save_state(tmp_path)
    model = peft_model(model_dirs["qwen3"], tmp_path)

    result = trainer.forward_backward(batch(2), loss)

    expected = literal_loss(model, batch(2), loss)
    expected.backward()
    assert result.loss == pytest.approx(float(expected), abs=1e-5)
    theirs = trained_weights(model)
    ours = trained_weights(trainer.module)
    # peft wraps the module, so its own names have the file's prefix already
    assert {name.removeprefix("base_model.model.") for name in theirs} == set(ours)
    for name, weight in theirs.items():
        assert weight.grad is not None
        gradient = ours[name.removeprefix("base_model.model.")].grad
        assert gradient is not None
        np.testing.assert_allclose(gradient.numpy(), weight.grad.numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_steps_change_the_adapter_and_nothing_below_it(model_dirs: dict[str, Path], name: str) -> None:
    trainer = trainer_of(model_dirs[name])
    before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}

    stepped(trainer, 1, 2)

    adapter = {id(weight) for weight in trained_weights(trainer.module).values()}
    assert len(adapter) == (
        2 * 7 * 2 if name == "qwen3" else 2 * 4 * 2
    )  # A and B of each layer's projections
    for key, weight in trainer.module.named_parameters():
        assert torch.equal(weight, before[key]) == (id(weight) not in adapter), key
        assert (weight.grad is not None or weight in trainer._optimizer.state) == (id(weight) in adapter), key


def test_a_new_adapter_changes_nothing_and_its_seed_says_what_it_is(model_dirs: dict[str, Path]) -> None:
    plain = TorchTrainer(model_dirs["qwen3"], device=CPU, micro_batch_tokens=4096)
    first, again, other = (
        trainer_of(model_dirs["qwen3"], LoraOptions(rank=4, seed=seed)) for seed in (1, 1, 2)
    )
    for ours, expected in zip(
        first.forward(batch(), temperature=1), plain.forward(batch(), temperature=1), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
    one, two, three = adapter_of(first), adapter_of(again), adapter_of(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {torch.equal(one[name], three[name]) for name in one if "lora_A" in name} == {False}


@pytest.mark.parametrize("loss", [GRPO, GSPO], ids=["grpo", "gspo"])
def test_packed_trees_and_micro_batches_give_what_single_sequences_do(
    model_dirs: dict[str, Path], loss: LossConfig
) -> None:
    samples = rollouts(groups=2, size=3, prompt=16, sampled=12)
    gradients: list[Tensor] = []
    forwarded: list[int] = []
    for takes_trees, budget in ((True, 4096), (True, 60), (False, 4096)):
        trainer = stepped(trainer_of(model_dirs["llama"], micro_batch_tokens=budget), 1)
        trainer._takes_trees = takes_trees
        forwarded.append(trainer.forward_backward(samples, loss).forwarded_tokens)
        gradients.append(gradient_of(trainer))
    assert forwarded[0] < forwarded[1] < forwarded[2]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=1e-4)


def test_the_reference_is_the_module_without_its_adapter_and_no_copy(model_dirs: dict[str, Path]) -> None:
    base = TorchTrainer(model_dirs["qwen3"], device=CPU, micro_batch_tokens=4096)
    reference = base.forward(batch(2), temperature=1.0)
    brought = [
        replace(sample, reference_logprobs=logprobs)
        for sample, logprobs in zip(batch(2), reference, strict=True)
    ]
    said: list[float] = []
    gradients: list[Tensor] = []
    for samples in (batch(2), brought):
        trainer = stepped(trainer_of(model_dirs["qwen3"]), 1)
        said.append(trainer.forward_backward(samples, replace(GSPO, kl_coef=0.1)).kl_to_reference or 0.0)
        gradients.append(gradient_of(trainer))
        assert trainer._reference is None
    assert said[0] == pytest.approx(said[1], rel=1e-4)
    assert said[0] > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


async def open_engine(model_dir: Path, lora: LoraOptions | None = LORA) -> LocalEngine:
    return await LocalEngine.open(
        model_dir, max_context_tokens=64, max_batch=4, stop_token_ids=[STOP], device="cpu", lora=lora
    )


async def train(engine: LocalEngine, *seeds: int) -> None:
    for seed in seeds:
        await engine.forward_backward(batch(seed), LossConfig())
        await engine.step(STEP)
        await engine.publish()


@pytest.mark.parametrize(
    ("name", "lora"),
    [("qwen3", LORA), ("qwen3", WITH_HEAD), ("llama", WITH_HEAD), ("qwen2", LORA), ("gpt2", LORA)],
    ids=["fused", "fused-tied-head", "fused-head", "module", "module-conv1d"],
)
async def test_the_sampler_draws_from_exactly_what_the_trainer_trains(
    model_dirs: dict[str, Path], name: str, lora: LoraOptions
) -> None:
    engine = await open_engine(model_dirs[name], lora)
    try:
        await train(engine, 1, 2, 3)
        for turn in range(3):  # the later ones go on from kept contexts
            prompt = np.arange(1, 6 + turn, dtype=np.int32)
            drawn = await engine.sample(
                prompt, SamplingParams(max_tokens=12, seed=turn), session_id="s", turn_index=0
            )
            ids = np.concatenate([prompt, drawn.token_ids])
            mask = np.arange(ids.size) >= prompt.size
            zeros = np.zeros(ids.size, np.float32)
            sample = Sample(
                sequence_id="r",
                group_id="g",
                token_ids=ids,
                loss_mask=mask,
                sampler_logprobs=zeros,
                advantages=zeros,
                weights_versions=np.where(mask, 3, -1).astype(np.int32),
            )
            (scored,) = await engine.forward([sample], temperature=1.0)
            np.testing.assert_allclose(drawn.logprobs, scored[mask], atol=2e-5)
            base = module_logprobs(model_dirs[name], ids.tolist())[mask[1:]]
            assert np.abs(base[np.arange(drawn.token_ids.size), drawn.token_ids] - scored[mask]).max() > 1e-3
    finally:
        await engine.close()


async def test_a_resumed_adapter_goes_on_bit_for_bit(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    uninterrupted, resumed = await open_engine(model_dirs["qwen3"]), await open_engine(model_dirs["qwen3"])
    dropped = await open_engine(model_dirs["qwen3"])
    try:
        await train(uninterrupted, 1, 2)
        await uninterrupted.save(tmp_path / "step-2")
        await train(uninterrupted, 3)
        await resumed.load(tmp_path / "step-2")
        await dropped.load(tmp_path / "step-2", weights_only=True)
        assert await resumed.publish() == await dropped.publish() == 2
        await train(resumed, 3)
        await train(dropped, 3)
        for engine, name in ((uninterrupted, "one"), (resumed, "other"), (dropped, "dropped")):
            await engine.save(tmp_path / name)
    finally:
        for engine in (uninterrupted, resumed, dropped):
            await engine.close()
    for name in (ADAPTER_FILE, OPTIMIZER_FILE, MANIFEST_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert (tmp_path / "one" / ADAPTER_FILE).read_bytes() != (
        tmp_path / "dropped" / ADAPTER_FILE
    ).read_bytes()
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {ADAPTER_FILE, CONFIG_FILE, OPTIMIZER_FILE, MANIFEST_FILE, "tokenizer.json"}


@pytest.mark.parametrize("lora", [LORA, WITH_HEAD], ids=["all-linear", "with-head"])
async def test_weights_alone_are_a_model_directory_and_an_adapter_that_peft_reads(
    model_dirs: dict[str, Path], tmp_path: Path, lora: LoraOptions
) -> None:
    merged, ids = tmp_path / "merged", [3, 1, 4, 1, 5, 9, 2, 6]
    engine, again = await open_engine(model_dirs["qwen3"], lora), await open_engine(model_dirs["qwen3"], lora)
    try:
        await train(engine, 1, 2)
        await engine.save(merged, weights_only=True)
        await again.load(merged)
        await again.save(tmp_path / "again")
    finally:
        await engine.close()
        await again.close()

    with torch.no_grad():
        logits = peft_model(model_dirs["qwen3"], merged / "adapter")(input_ids=torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits[:-1], -1).numpy()
    np.testing.assert_allclose(module_logprobs(merged, ids), expected, atol=1e-5)
    assert np.abs(module_logprobs(model_dirs["qwen3"], ids) - expected).max() > 1e-2
    assert (merged / "adapter" / ADAPTER_FILE).read_bytes() == (
        tmp_path / "again" / ADAPTER_FILE
    ).read_bytes()
    assert not (merged / OPTIMIZER_FILE).exists()
    whole = await open_engine(merged, None)  # and trains on as any other model
    await train(whole, 3)
    await whole.close()


def test_an_adapter_that_does_not_fit_is_one_clear_line(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    trainer.save_state(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())

    def refusal(lora: LoraOptions = LORA, **changes: Any) -> str:
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError) as caught:
            trainer_of(model_dirs["qwen3"], lora).load_state(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has r 4, lora_alpha 8, and r 2, lora_alpha 8 is" in refusal(replace(LORA, rank=2))
    assert "has r 4, lora_alpha 16, and" in refusal(lora_alpha=16)
    assert "use_rslora True" in refusal(use_rslora=True)
    assert "adapts other layers" in refusal(replace(LORA, target_modules=("q_proj",)))
    (tmp_path / ADAPTER_FILE).write_bytes(b"\xff" * 64)
    assert "cannot be read" in refusal()
    (tmp_path / ADAPTER_FILE).unlink()
    assert f"holds no {ADAPTER_FILE}" in refusal()


@pytest.mark.parametrize(
    ("targets", "said"),
    [("nothing", "nothing not found"), (("embed_tokens",), "is no linear layer"), (("q_norm",), "RMSNorm")],
)
def test_targets_that_cannot_be_adapted_are_named(
    model_dirs: dict[str, Path], targets: str | tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(model_dirs["qwen3"], LoraOptions(target_modules=targets))
