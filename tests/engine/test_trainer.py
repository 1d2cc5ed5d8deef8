from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.models import module_logprobs, random_ids
from torch import Tensor

from pilotage.engine import LocalEngine
from pilotage.engine.logprobs import project
from pilotage.engine.micro_batches import passes, samples_of
from pilotage.engine.modules import load_module
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import TrainerError
from pilotage.interfaces import Engine
from pilotage.types import AdamParams, Denominators, LossConfig, PolicyLoss, Reduction, Sample

CPU = torch.device("cpu")
WIDE = LossConfig(policy_loss=PolicyLoss.GRPO, reduction=Reduction.TOKEN_MEAN, clip_low=0.2, clip_high=0.2)


def make_sample(rng: np.random.Generator, sequence_id: str, length: int, *, prefix: int = 2) -> Sample:
    """About half of the tokens after a prefix are trained; sampler log-probs are near a flat policy's."""
    mask = rng.random(length) < 0.5
    mask[:prefix] = False
    mask[-1] = True
    return Sample(
        sequence_id=sequence_id,
        group_id="g",
        token_ids=random_ids(rng, length),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, rng.normal(-3.5, 0.5, length), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        weights_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def batch(seed: int = 0) -> list[Sample]:
    """Five rollouts, two of them with two branches each."""
    rng = np.random.default_rng(seed)
    sizes = [("a", 9), ("b", 30), ("c", 4), ("a", 17), ("d", 12), ("e", 21), ("d", 12)]
    return [make_sample(rng, sequence_id, size) for sequence_id, size in sizes]


def trainer_of(model_dir: Path, *, micro_batch_tokens: int = 4096) -> TorchTrainer:
    return TorchTrainer(model_dir, device=CPU, micro_batch_tokens=micro_batch_tokens)


def gradient(trainer: TorchTrainer) -> NDArray[np.float32]:
    grads = [p.grad.flatten() for p in trainer.module.parameters() if p.grad is not None]
    return torch.cat(grads).numpy().copy()


def literal_loss(model_dir: Path, samples: list[Sample], config: LossConfig) -> tuple[float, Tensor]:
    """The objectives as their papers write them, in float64 with autograd, rollout by rollout."""
    module = load_module(model_dir, device=CPU).double()
    rollouts: dict[str, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.sequence_id, []).append(sample)
    losses: list[Tensor] = []
    sizes: list[int] = []
    for branches in rollouts.values():
        logprobs, behaviour, advantages = [], [], []
        for branch in branches:
            ids = torch.from_numpy(branch.token_ids).long()
            logits = module(input_ids=ids[None]).logits[0, :-1] / config.temperature
            trained = torch.from_numpy(branch.loss_mask[1:].copy())
            logprobs.append(torch.log_softmax(logits, -1)[torch.arange(ids.numel() - 1), ids[1:]][trained])
            behaviour.append(torch.from_numpy(branch.sampler_logprobs[branch.loss_mask]).double())
            advantages.append(torch.from_numpy(branch.advantages[branch.loss_mask]).double())
        log_ratio = torch.cat(logprobs) - torch.cat(behaviour)
        ratio = log_ratio.exp()
        if config.policy_loss is PolicyLoss.GSPO:
            ratio = log_ratio.mean().exp().expand(log_ratio.numel())
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        objective = torch.minimum(ratio * torch.cat(advantages), bounded * torch.cat(advantages))
        if config.policy_loss is PolicyLoss.CROSS_ENTROPY:
            objective = torch.cat(logprobs)
        if config.policy_loss is PolicyLoss.CISPO:
            objective = bounded.detach() * torch.cat(advantages) * torch.cat(logprobs)
        if config.policy_loss in (PolicyLoss.ICEPOP, PolicyLoss.TIS_SEQUENCE, PolicyLoss.MIS_SEQUENCE):
            whole = ratio if config.policy_loss is PolicyLoss.ICEPOP else log_ratio.sum().exp()
            inside = whole.clamp(1 - config.clip_low, 1 + config.clip_high)
            masked = torch.where(inside == whole, whole, 0.0)
            weight = inside if config.policy_loss is PolicyLoss.TIS_SEQUENCE else masked
            objective = weight.detach() * torch.cat(advantages) * torch.cat(logprobs)
        losses.append(-objective.sum())
        sizes.append(objective.numel())
    if config.reduction is Reduction.TOKEN_MEAN:
        loss = torch.stack(losses).sum() / sum(sizes)
    elif config.reduction is Reduction.SEQUENCE_MEAN:
        loss = torch.stack([part / size for part, size in zip(losses, sizes, strict=True)]).mean()
    else:
        loss = torch.stack(losses).sum() / (len(losses) * config.dr_grpo_tokens)
    loss.backward()
    return float(loss), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("policy", list(PolicyLoss))
@pytest.mark.parametrize("reduction", list(Reduction))
def test_loss_and_gradient_are_those_of_the_papers(
    model_dirs: dict[str, Path], policy: PolicyLoss, reduction: Reduction
) -> None:
    config = LossConfig(
        policy_loss=policy,
        reduction=reduction,
        clip_low=0.2,
        clip_high=0.28,
        temperature=0.8,
        dr_grpo_tokens=20,
    )
    expected_loss, expected = literal_loss(model_dirs["qwen3"], batch(), config)
    trainer = trainer_of(model_dirs["qwen3"])

    result = trainer.forward_backward(batch(), config)

    assert result.loss == pytest.approx(expected_loss, abs=1e-6)
    # float32 against float64: 1e-6 of the largest entry
    np.testing.assert_allclose(
        gradient(trainer), expected.numpy(), atol=1e-6 * float(expected.abs().max()) * 5
    )


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("policy", [PolicyLoss.GSPO, PolicyLoss.GRPO])
def test_how_a_batch_is_split_changes_neither_loss_nor_gradient(
    model_dirs: dict[str, Path], name: str, policy: PolicyLoss
) -> None:
    config = replace(WIDE, policy_loss=policy, reduction=Reduction.SEQUENCE_MEAN)
    whole, pieces = trainer_of(model_dirs[name]), trainer_of(model_dirs[name], micro_batch_tokens=1)

    one, other = whole.forward_backward(batch(), config), pieces.forward_backward(batch(), config)

    assert one.loss == pytest.approx(other.loss, abs=1e-6)
    np.testing.assert_allclose(gradient(whole), gradient(pieces), atol=1e-6)
    assert (one.trained_tokens, one.num_sequences) == (other.trained_tokens, other.num_sequences)


def test_micro_batches_hold_whole_rollouts_of_like_length_within_the_budget() -> None:
    micro_batches = passes(batch(), budget_tokens=40, trees=False)

    names = [[sample.sequence_id for sample in samples_of(each)] for each in micro_batches]
    # by longest branch: c 4, d 12 + 12, a 9 + 17, e 21, b 30; three of padded length 12 are 36 tokens
    assert names == [["c", "d", "d"], ["a", "a"], ["e"], ["b"]]


def test_a_batch_without_a_trained_token_is_a_loss_of_zero_and_its_step_changes_nothing(
    model_dirs: dict[str, Path],
) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}

    result = trainer.forward_backward([], WIDE)
    step = trainer.step(AdamParams(learning_rate=0.1))

    assert (result.loss, result.trained_tokens, result.clip_fraction) == (0.0, 0, None)
    assert (result.logprob_gap_mean, result.logprob_gap_max, result.gap_k3) == (None, None, None)
    assert step.grad_norm == 0
    assert all(torch.equal(before[name], value) for name, value in trainer.module.state_dict().items())


def test_gradients_add_up_until_the_step(model_dirs: dict[str, Path]) -> None:
    once, twice = trainer_of(model_dirs["qwen3"]), trainer_of(model_dirs["qwen3"])
    once.forward_backward(batch(), WIDE)
    twice.forward_backward(batch(), WIDE)
    twice.forward_backward(batch(), WIDE)
    np.testing.assert_allclose(gradient(twice), 2 * gradient(once), rtol=1e-4, atol=1e-7)

    one, two = once.step(AdamParams()), twice.step(AdamParams())

    assert two.grad_norm == pytest.approx(2 * one.grad_norm, rel=1e-5)
    assert (one.num_backwards, two.num_backwards) == (1, 2)
    with pytest.raises(TrainerError, match="no gradient was accumulated"):
        once.step(AdamParams())


def test_a_discarded_gradient_is_in_no_step(model_dirs: dict[str, Path]) -> None:
    trainer, clean = trainer_of(model_dirs["qwen3"]), trainer_of(model_dirs["qwen3"])
    trainer.forward_backward(batch(), WIDE)
    trainer.discard()
    with pytest.raises(TrainerError, match="no gradient was accumulated"):
        trainer.step(AdamParams())
    for each in (trainer, clean):
        each.forward_backward(batch(), WIDE)
    np.testing.assert_array_equal(gradient(trainer), gradient(clean))
    assert trainer.step(AdamParams()).num_backwards == 1


def test_a_first_adam_step_moves_every_weight_by_the_learning_rate(model_dirs: dict[str, Path]) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    before = torch.cat([p.detach().flatten() for p in trainer.module.parameters()])
    trainer.forward_backward(batch(), WIDE)
    grads = gradient(trainer)
    trainer.step(AdamParams(learning_rate=1e-3, max_grad_norm=0))
    moved = (torch.cat([p.detach().flatten() for p in trainer.module.parameters()]) - before).numpy()

    # bias-corrected moments are g and g^2, so the step is -lr g / (|g| + eps)
    clear = np.abs(grads) > 1e-5
    assert clear.mean() > 0.5
    np.testing.assert_allclose(moved[clear], -1e-3 * np.sign(grads[clear]), rtol=2e-3, atol=1e-6)


def test_the_gradient_is_clipped_to_its_global_norm(model_dirs: dict[str, Path]) -> None:
    free, clipped = trainer_of(model_dirs["qwen3"]), trainer_of(model_dirs["qwen3"])
    # eps far above any gradient turns Adam into plain descent, so that the size of a step shows the clip
    params = AdamParams(learning_rate=1.0, eps=1e3, max_grad_norm=0)
    before = torch.cat([p.detach().flatten() for p in free.module.parameters()])
    moved: list[float] = []
    for trainer, norm in ((free, 0.0), (clipped, 0.01)):
        trainer.forward_backward(batch(), WIDE)
        step = trainer.step(replace(params, max_grad_norm=norm))
        after = torch.cat([p.detach().flatten() for p in trainer.module.parameters()])
        moved.append(float((after - before).norm()))
        assert step.grad_norm > 0.05
        assert moved[-1] * 1e3 == pytest.approx(norm or step.grad_norm, rel=0.05)


def test_a_gradient_that_is_not_finite_is_refused_and_forgotten(model_dirs: dict[str, Path]) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    sample = make_sample(np.random.default_rng(0), "a", 8)
    broken = np.where(sample.loss_mask, np.nan, 0).astype(np.float32)
    trainer.forward_backward([replace(sample, advantages=broken)], WIDE)

    with pytest.raises(TrainerError, match="norm is nan"):
        trainer.step(AdamParams())

    assert all(torch.equal(before[name], value) for name, value in trainer.module.state_dict().items())
    trainer.forward_backward([sample], WIDE)
    assert trainer.step(AdamParams()).num_backwards == 1


def test_the_gap_is_measured_on_trained_tokens(model_dirs: dict[str, Path]) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    sample = make_sample(np.random.default_rng(0), "a", 12)
    exact = np.zeros(12, np.float32)
    exact[1:] = trainer.logprobs(sample.token_ids)
    shifted = np.where(sample.loss_mask, exact - 0.25, 0).astype(np.float32)

    result = trainer.forward_backward([replace(sample, sampler_logprobs=shifted)], WIDE)

    assert result.logprob_gap_mean == pytest.approx(0.25, abs=1e-5)
    assert result.logprob_gap_max == pytest.approx(0.25, abs=1e-5)
    assert result.gap_k3 == pytest.approx(np.exp(0.25) - 0.25 - 1, abs=1e-5)
    assert result.kl_to_reference is None


def test_the_reference_is_the_model_that_was_opened(model_dirs: dict[str, Path]) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    config = replace(WIDE, kl_coef=0.1)

    assert trainer.forward_backward(batch(), config).kl_to_reference == pytest.approx(0, abs=1e-9)
    trainer.step(AdamParams(learning_rate=1e-2))
    first = trainer.forward_backward(batch(), config).kl_to_reference
    trainer.step(AdamParams(learning_rate=0))
    assert first is not None
    assert first > 1e-3
    assert trainer.forward_backward(batch(), config).kl_to_reference == pytest.approx(first)


def test_log_probs_in_chunks_are_those_of_all_logits_at_once() -> None:
    head, hidden = torch.nn.Linear(8, 20, bias=False), torch.randn(11, 8, requires_grad=True)
    targets = torch.arange(11)
    whole = project(hidden, head, targets, temperature=0.5)
    chunked = project(hidden, head, targets, temperature=0.5, chunk_logits=60)  # three rows at a time

    torch.testing.assert_close(chunked, whole)
    expected = torch.autograd.grad(whole.square().sum(), hidden)[0]
    torch.testing.assert_close(torch.autograd.grad(chunked.square().sum(), hidden)[0], expected)


def test_pieces_of_a_batch_that_carry_its_counts_add_up_to_it(model_dirs: dict[str, Path]) -> None:
    config = replace(WIDE, reduction=Reduction.SEQUENCE_MEAN)
    whole, split_up = trainer_of(model_dirs["qwen3"]), trainer_of(model_dirs["qwen3"])
    expected = whole.forward_backward(batch(), config)
    counts = Denominators.of(batch())
    ours, rest = [s for s in batch() if s.sequence_id in "ac"], [s for s in batch() if s.sequence_id in "bde"]

    parts = [split_up.forward_backward(piece, config, denominators=counts) for piece in (ours, rest)]

    assert sum(part.loss for part in parts) == pytest.approx(expected.loss, abs=1e-6)
    np.testing.assert_allclose(gradient(split_up), gradient(whole), atol=1e-6)
    # figures speak of the piece, not of the batch that it belongs to
    assert [part.num_sequences for part in parts] == [2, 3]
    assert sum(part.trained_tokens for part in parts) == expected.trained_tokens
    assert split_up.step(AdamParams()).num_backwards == 2


@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_a_sample_is_scored_as_the_module_predicts_it(
    model_dirs: dict[str, Path], micro_batch_tokens: int
) -> None:
    samples = batch()
    untrained = replace(samples[1], loss_mask=np.zeros(samples[1].token_ids.size, np.bool_))
    samples = [samples[0], untrained, *samples[2:], samples[0]]
    trainer = trainer_of(model_dirs["qwen3"], micro_batch_tokens=micro_batch_tokens)

    scored = trainer.forward(samples, temperature=0.7)

    for sample, logprobs in zip(samples, scored, strict=True):
        ids = sample.token_ids.tolist()
        table = module_logprobs(model_dirs["qwen3"], ids, temperature=0.7)
        expected = np.array([0, *table[np.arange(len(ids) - 1), ids[1:]]])
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, np.where(sample.loss_mask, expected, 0), atol=1e-5)
    assert all(p.grad is None for p in trainer.module.parameters())


@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_a_gradient_comes_with_the_log_probs_that_it_was_computed_from(
    model_dirs: dict[str, Path], micro_batch_tokens: int
) -> None:
    samples = batch()
    untrained = replace(samples[1], loss_mask=np.zeros(samples[1].token_ids.size, np.bool_))
    samples = [samples[0], untrained, *samples[2:]]
    trainer = trainer_of(model_dirs["qwen3"], micro_batch_tokens=micro_batch_tokens)

    result = trainer.forward_backward(samples, LossConfig(temperature=0.7))

    scored = trainer.forward(samples, temperature=0.7)
    expected = [row[sample.loss_mask] for row, sample in zip(scored, samples, strict=True)]
    np.testing.assert_array_equal(result.trainer_logprobs_n, np.concatenate(expected))


def test_scoring_leaves_an_accumulated_gradient_as_it_is(model_dirs: dict[str, Path]) -> None:
    trainer = trainer_of(model_dirs["qwen3"])
    trainer.forward_backward(batch(), WIDE)
    before = gradient(trainer)
    trainer.forward(batch(), temperature=1.0)

    assert np.array_equal(before, gradient(trainer))
    assert trainer.step(AdamParams()).num_backwards == 1


def test_reference_log_probs_that_a_sample_brings_replace_the_frozen_reference(
    model_dirs: dict[str, Path],
) -> None:
    config = replace(WIDE, kl_coef=0.1)
    own, given, mixed = (trainer_of(model_dirs["qwen3"]) for _ in range(3))
    for trainer in (own, given, mixed):  # away from the reference, so that the term is not 0
        trainer.forward_backward(batch(), WIDE)
        trainer.step(AdamParams(learning_rate=1e-2))
    scores = trainer_of(model_dirs["qwen3"]).forward(batch(), temperature=1.0)
    brought = [replace(s, reference_logprobs=r) for s, r in zip(batch(), scores, strict=True)]
    half = [replace(s, reference_logprobs=None) if i % 2 else s for i, s in enumerate(brought)]

    expected = own.forward_backward(batch(), config)
    assert expected.kl_to_reference is not None
    assert expected.kl_to_reference > 1e-3
    for trainer, samples in ((given, brought), (mixed, half)):
        result = trainer.forward_backward(samples, config)
        assert result.kl_to_reference == pytest.approx(expected.kl_to_reference, rel=1e-4)
        np.testing.assert_allclose(gradient(trainer), gradient(own), atol=1e-6)

    twice = [
        replace(s, reference_logprobs=r + np.float32(1) * s.loss_mask)
        for s, r in zip(batch(), scores, strict=True)
    ]
    moved = given.forward_backward(twice, config).kl_to_reference
    assert moved is not None
    assert moved > 2 * expected.kl_to_reference


def test_on_policy_behaviour_is_not_read_and_its_gap_not_measured(model_dirs: dict[str, Path]) -> None:
    config = replace(WIDE, on_policy=True)
    one, other = trainer_of(model_dirs["qwen3"]), trainer_of(model_dirs["qwen3"])
    noise = [replace(s, sampler_logprobs=s.sampler_logprobs * np.float32(9)) for s in batch()]

    result = one.forward_backward(batch(), config)
    other.forward_backward(noise, config)

    assert np.array_equal(gradient(one), gradient(other))
    assert (result.logprob_gap_mean, result.clip_fraction) == (None, None)


async def test_the_local_engine_scores_and_takes_pieces_as_an_engine_does(engine: LocalEngine) -> None:
    held: Engine = engine
    counts = Denominators(trained_tokens=1000, num_sequences=50)
    small = await held.forward_backward(batch(), WIDE, denominators=counts)
    whole = await held.forward_backward(batch(), WIDE)
    assert small.loss == pytest.approx(whole.loss * whole.trained_tokens / 1000, rel=1e-6)

    before = await held.forward(batch(), temperature=1.0)
    await held.step(AdamParams(learning_rate=1e-2))
    after = await held.forward(batch(), temperature=1.0)
    assert held.weights_version == 0  # scores are those of the trainer, published or not
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) > 1e-3
