"""Two ranks are one process: same losses, same gradients, same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.distributed import rank_jobs
from tests.engine.distributed.rank_jobs import Trained
from tests.engine.distributed.worlds import World
from tests.engine.test_prefix_tree import rollouts
from tests.engine.test_trainer import batch, make_sample

from pilotage.engine.distributed.fsdp import TrainerOptions
from pilotage.engine.trainer import TorchTrainer
from pilotage.types import AdamParams, LossConfig, PolicyLoss, Reduction, Sample

GSPO = LossConfig(policy_loss=PolicyLoss.GSPO, reduction=Reduction.SEQUENCE_MEAN, clip_low=0.5, clip_high=0.5)
GRPO = LossConfig(policy_loss=PolicyLoss.GRPO, reduction=Reduction.TOKEN_MEAN, clip_low=0.2, clip_high=0.28)
# With eps far above rounding, a gradient that is almost 0 does not turn rounding into a step of full size.
ADAM = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=0.05)


def masked(samples: list[Sample]) -> list[Sample]:
    """Mask two whole samples, as rollouts that ended badly are."""
    cleared = [
        replace(s, loss_mask=np.zeros_like(s.loss_mask)) if i in (1, 3) else s for i, s in enumerate(samples)
    ]
    return [*cleared, make_sample(np.random.default_rng(5), "f", 14)]


def one_process(
    model_dir: Path, batches: list[list[Sample]], loss: LossConfig, params: AdamParams = ADAM
) -> Trained:
    trainer = TorchTrainer(model_dir, device=torch.device("cpu"), micro_batch_tokens=4096)
    results, steps = [], []
    for samples in batches:
        results.append(trainer.forward_backward(samples, loss))
        steps.append(trainer.step(params))
    weights = {name: p.detach().numpy().copy() for name, p in trainer.module.named_parameters()}
    return Trained(results=results, steps=steps, weights=weights)


def assert_same(got: Trained, expected: Trained) -> None:
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(got.weights[name], weight, atol=1e-6, rtol=0, err_msg=name)
    for ours, theirs in zip(got.results, expected.results, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.trainer_logprobs_n is not None
        assert theirs.trainer_logprobs_n is not None
        np.testing.assert_allclose(ours.trainer_logprobs_n, theirs.trainer_logprobs_n, atol=1e-5)
        assert ours.clip_fraction == theirs.clip_fraction
        assert ours.logprob_gap_mean == pytest.approx(theirs.logprob_gap_mean, abs=1e-5)
        assert ours.kl_to_reference == pytest.approx(theirs.kl_to_reference, abs=1e-6)
        assert (ours.trained_tokens, ours.num_sequences) == (theirs.trained_tokens, theirs.num_sequences)
        assert ours.forwarded_tokens >= theirs.forwarded_tokens  # which shares more
    for ours, theirs in zip(got.steps, expected.steps, strict=True):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


@pytest.mark.parametrize("loss", [GSPO, GRPO], ids=["gspo", "grpo"])
def test_two_ranks_train_as_one_process_does(
    model_dirs: dict[str, Path], two_ranks: World, loss: LossConfig
) -> None:
    batches = [batch(0), masked(batch(1)), batch(2)]

    [lead, other] = two_ranks.run(rank_jobs.train, model_dirs["qwen3"], batches, loss, ADAM)

    assert_same(lead, one_process(model_dirs["qwen3"], batches, loss))
    assert other.results == []
    assert other.steps == lead.steps


def test_ranks_forward_a_prefix_once_that_their_rollouts_share(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    samples = rollouts(groups=2, size=4, prompt=24, sampled=10)

    roomy = replace(rank_jobs.EXACT, micro_batch_tokens=1000)
    [lead, _] = two_ranks.run(rank_jobs.train, model_dirs["qwen3"], [samples], GSPO, ADAM, roomy)

    expected = one_process(model_dirs["qwen3"], [samples], GSPO)
    assert_same(lead, expected)  # a group on each rank, so that nothing is forwarded by both
    assert lead.results[0].forwarded_tokens == expected.results[0].forwarded_tokens


def test_a_batch_of_one_rollout_and_an_empty_one_need_both_ranks_all_the_same(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    batches = [batch(0)[1:2], [], batch(1)[:1]]

    [lead, _] = two_ranks.run(rank_jobs.train, model_dirs["llama"], batches, GSPO, ADAM)

    expected = one_process(model_dirs["llama"], batches, GSPO)
    assert lead.steps[1].grad_norm == expected.steps[1].grad_norm == 0
    assert_same(lead, expected)


def test_the_reference_is_the_model_that_was_opened_unless_a_sample_brings_its_own(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    loss = replace(GRPO, kl_coef=0.3)
    second = batch(1)
    brought = np.where(second[1].loss_mask, -3.0, 0).astype(np.float32)
    second[1] = replace(second[1], reference_logprobs=brought)
    batches = [batch(0), second]

    [lead, _] = two_ranks.run(rank_jobs.train, model_dirs["qwen3"], batches, loss, ADAM)

    expected = one_process(model_dirs["qwen3"], batches, loss)
    assert expected.results[1].kl_to_reference is not None
    assert expected.results[1].kl_to_reference > 1e-3
    assert_same(lead, expected)


def test_the_pieces_of_a_batch_add_up_to_it(model_dirs: dict[str, Path], two_ranks: World) -> None:
    samples = sorted(batch(0), key=lambda sample: sample.sequence_id)
    pieces = [samples[:2], samples[2:]]  # rollout a, then b to e

    [lead, _] = two_ranks.run(rank_jobs.train_in_pieces, model_dirs["qwen3"], pieces, GSPO, ADAM)

    expected = one_process(model_dirs["qwen3"], [samples], GSPO)
    assert sum(result.loss for result in lead.results) == pytest.approx(expected.results[0].loss, abs=1e-6)
    assert lead.steps[0].num_backwards == 2
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(lead.weights[name], weight, atol=1e-6, rtol=0)


def test_log_probs_come_back_in_the_order_of_the_samples(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    samples = masked(batch(0))

    [scored, nothing] = two_ranks.run(rank_jobs.score, model_dirs["qwen3"], samples, 0.7)

    trainer = TorchTrainer(model_dirs["qwen3"], device=torch.device("cpu"), micro_batch_tokens=4096)
    assert nothing is None
    for got, expected in zip(scored, trainer.forward(samples, temperature=0.7), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_refused_step_is_refused_by_every_rank_and_forgotten(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    good = batch(0)
    broken = [replace(good[0], advantages=np.where(good[0].loss_mask, np.nan, 0).astype(np.float32))]

    lead, other = two_ranks.run(rank_jobs.misuse, model_dirs["qwen3"], broken, good, GSPO)

    assert lead == other
    assert lead[0].startswith("TrainerError: step without forward_backward")
    assert lead[1].startswith("TrainerError: the gradient's norm is nan")
    assert lead[2:] == ["unchanged True", "num_backwards 1"]


def test_layers_are_computed_again_in_the_backward_pass_only_where_asked(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    for counts in two_ranks.run(rank_jobs.recomputed_layers, model_dirs["qwen3"], batch(0), GSPO):
        assert counts == {False: 2, True: 4}  # two layers, one pass


def test_bfloat16_compute_stays_near_float32_and_keeps_float32_master_weights(
    model_dirs: dict[str, Path], two_ranks: World
) -> None:
    options = TrainerOptions(micro_batch_tokens=40, compute_dtype="bfloat16")
    tiny = AdamParams(learning_rate=1e-6, eps=1e-4)

    [lead, _] = two_ranks.run(rank_jobs.train, model_dirs["qwen3"], [batch(0)], GSPO, ADAM, options)
    [(before, after), _] = two_ranks.run(
        rank_jobs.parameters_after_step, model_dirs["qwen3"], batch(0), GSPO, tiny, options
    )

    expected = one_process(model_dirs["qwen3"], [batch(0)], GSPO)
    assert lead.results[0].loss == pytest.approx(expected.results[0].loss, abs=0.02)
    assert lead.steps[0].grad_norm == pytest.approx(expected.steps[0].grad_norm, rel=0.1)
    # a step of 1e-6 is far below what bfloat16 resolves near 0.1 (5e-4), and is not lost
    moved = np.abs(after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"])
    assert 0 < moved.max() < 2e-6
