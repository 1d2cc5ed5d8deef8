"""Which of the Tinker wire's losses a loss becomes, and that its gradient is the loss's own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotage.algorithms import TrainedTokens, policy_loss
from pilotage.client.tinker_losses import (
    WireLoss,
    check_loss,
    measured,
    needs_forward,
    one_pass,
    surrogate,
    trained_values,
    wire_loss_value,
)
from pilotage.errors import ConfigError
from pilotage.types import Denominators, LossConfig, PolicyLoss, Reduction, Sample

GRPO, CISPO, CROSS_ENTROPY = PolicyLoss.GRPO, PolicyLoss.CISPO, PolicyLoss.CROSS_ENTROPY
NATIVE = {GRPO: "ppo", CISPO: "cispo"}


def random_samples(rng: np.random.Generator) -> list[Sample]:
    """Up to four rollouts of up to three branches; each sample trains at least one token."""
    samples: list[Sample] = []
    for rollout in range(int(rng.integers(1, 5))):
        for _ in range(int(rng.integers(1, 4))):
            size = int(rng.integers(2, 9))
            mask = rng.random(size) < 0.6
            mask[0], mask[-1] = False, True
            samples.append(
                Sample(
                    sequence_id=f"rollout-{rollout}",
                    group_id="group",
                    token_ids=rng.integers(1, 30, size).astype(np.int32),
                    loss_mask=mask,
                    sampler_logprobs=np.where(mask, -rng.random(size), 0).astype(np.float32),
                    advantages=np.where(mask, rng.normal(size=size), 0).astype(np.float32),
                    weights_versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
    return samples


def servers_gradient(wire: WireLoss, rows: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """The derivative of the documented losses with respect to each target's log-prob."""
    gradients: list[NDArray[np.float64]] = []
    for inputs, p in zip(wire.inputs, rows, strict=True):
        if wire.name == "cross_entropy":
            gradients.append(-inputs["weights"].astype(np.float64))
            continue
        assert wire.config is not None
        low, high = wire.config["clip_low_threshold"], wire.config["clip_high_threshold"]
        ratio, advantages = np.exp(p - inputs["logprobs"]), inputs["advantages"].astype(np.float64)
        bounded = np.clip(ratio, low, high)
        if wire.name == "cispo":
            gradients.append(-bounded * advantages)
        else:
            is_smaller = ratio * advantages <= bounded * advantages
            gradients.append(np.where(is_smaller, -ratio * advantages, 0.0))
    return gradients


generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
losses = st.builds(
    LossConfig,
    policy_loss=st.sampled_from(PolicyLoss),
    reduction=st.sampled_from(Reduction),
    clip_low=st.sampled_from([0.05, 0.3, 1.0]),
    clip_high=st.sampled_from([0.05, 0.3, 3.0]),
    on_policy=st.booleans(),
    dr_grpo_tokens=st.just(30),
)


@given(generators, losses, st.booleans())
def test_every_loss_reaches_the_server_with_its_own_gradient_and_value(
    rng: np.random.Generator, loss: LossConfig, has_dual_clip: bool
) -> None:
    if has_dual_clip and loss.policy_loss in (PolicyLoss.GRPO, PolicyLoss.GSPO):
        loss = dataclasses.replace(loss, dual_clip=1.2)
    samples = random_samples(rng)
    rows = [-rng.random(sample.token_ids.size - 1) for sample in samples]
    logprobs_n = trained_values(samples, rows)
    whole = Denominators(trained_tokens=100, num_sequences=7)
    expected = policy_loss(TrainedTokens.of(samples), logprobs_n, loss, denominators=whole)

    if needs_forward(loss):
        wire = surrogate(samples, expected.gradient_n)
    else:
        wire = one_pass(samples, loss, whole)
        if wire.name != "cross_entropy":
            assert wire_loss_value(wire, rows) == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)

    gradients = servers_gradient(wire, rows)
    np.testing.assert_allclose(trained_values(samples, gradients), expected.gradient_n, rtol=1e-5, atol=1e-9)
    for sample, gradient in zip(samples, gradients, strict=True):
        assert not gradient[~sample.loss_mask[1:]].any()
    assert measured(samples, loss, whole, logprobs_n).loss == expected.loss


@pytest.mark.parametrize("policy_loss", PolicyLoss)
def test_two_losses_are_the_servers_own_and_the_others_need_log_probs_first(policy_loss: PolicyLoss) -> None:
    loss = LossConfig(policy_loss=policy_loss)
    samples = random_samples(np.random.default_rng(0))
    is_direct = policy_loss in NATIVE or policy_loss is CROSS_ENTROPY
    assert needs_forward(loss) is not is_direct
    assert not needs_forward(dataclasses.replace(loss, on_policy=True))
    if is_direct:
        wire = one_pass(samples, loss, Denominators.of(samples))
        assert wire.name == NATIVE.get(policy_loss, "cross_entropy")
    on_policy = one_pass(samples, dataclasses.replace(loss, on_policy=True), Denominators.of(samples))
    assert on_policy.name == "cross_entropy"


def test_a_dual_clip_is_none_of_the_servers_losses() -> None:
    assert needs_forward(LossConfig(policy_loss=GRPO, dual_clip=3.0))


def test_thresholds_are_ratios() -> None:
    samples = random_samples(np.random.default_rng(1))
    loss = LossConfig(policy_loss=GRPO, clip_low=0.25, clip_high=0.5)
    wire = one_pass(samples, loss, Denominators.of(samples))
    assert wire.config == {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.85}, r"loss.temperature is 0.85: .* temperature 1 only; set .* to 1"),
        ({"kl_coef": 0.02}, r"loss.kl_coef is 0.02: .* reference; set it to 0"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_with_its_key(changes: dict[str, float], message: str) -> None:
    check_loss(LossConfig())
    with pytest.raises(ConfigError, match=message):
        check_loss(LossConfig(**changes))  # pyright: ignore[reportArgumentType]
