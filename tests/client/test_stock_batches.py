"""What is written for the stock wire is what our own reading of it finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.batches import sample

from pilotage.errors import InvalidBodyError
from pilotage.types import Denominators, LossConfig, PolicyLoss, Reduction
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.grpo import from_stock, to_rows
from pilotage.wire.grpo_out import from_stock_rows, to_stock

LOSSES = st.builds(
    LossConfig,
    policy_loss=st.sampled_from([PolicyLoss.GRPO, PolicyLoss.GSPO, PolicyLoss.CISPO]),
    reduction=st.sampled_from(list(Reduction)),
    clip_low=st.sampled_from([3e-4, 0.2, 1.0]),
    clip_high=st.sampled_from([4e-4, 0.28]),
    on_policy=st.booleans(),
    dr_grpo_tokens=st.sampled_from([1, 16]),
)


@settings(max_examples=50, deadline=None)
@given(loss=LOSSES, sizes=st.lists(st.integers(3, 9), min_size=1, max_size=4), data=st.data())
def test_samples_and_loss_come_back(loss: LossConfig, sizes: list[int], data: st.DataObject) -> None:
    samples = [
        sample(f"r{i}", size=size, advantage=data.draw(st.sampled_from([-1.5, 0.25, 2.0])))
        for i, size in enumerate(sizes)
    ]
    counts = Denominators(trained_tokens=3 * len(samples), num_sequences=2 * len(samples))
    tree = to_stock(samples, loss, counts, wants_logprobs=True)
    read = from_stock(decode_frame(encode_frame(tree)))
    scale = 1.0
    if loss.reduction is Reduction.DR_GRPO:
        scale = 1 / loss.dr_grpo_tokens  # the constant length goes with the advantages
        assert read.loss.dr_grpo_tokens == 1
    for name in ("policy_loss", "reduction", "clip_low", "clip_high", "dual_clip", "on_policy", "kl_coef"):
        assert getattr(read.loss, name) == getattr(loss, name), name
    assert read.wants_logprobs
    assert read.denominators is not None
    if loss.reduction is Reduction.TOKEN_MEAN:
        assert read.denominators.trained_tokens == counts.trained_tokens
    else:
        assert read.denominators.num_sequences == counts.num_sequences
    for sent, got in zip(samples, read.samples, strict=True):
        assert got.token_ids.tolist() == sent.token_ids.tolist()
        assert got.loss_mask.tolist() == sent.loss_mask.tolist()
        np.testing.assert_allclose(got.advantages, sent.advantages * np.float32(scale), rtol=1e-6)
        if not loss.on_policy:
            np.testing.assert_array_equal(got.sampler_logprobs, sent.sampler_logprobs)


def test_log_probs_of_a_reply_are_cut_to_the_tokens_that_they_are_of() -> None:
    samples = [sample("a", size=4), sample("b", size=3)]
    read = from_stock(
        decode_frame(
            encode_frame(to_stock(samples, LossConfig(), Denominators.of(samples), wants_logprobs=True))
        )
    )
    #                       P  P  A    A
    scored = [np.array([0, 0, -1.5, -2.5], np.float32), np.array([0, -3.5, -4.5], np.float32)]
    rows = to_rows(read.layout, scored)
    assert [found.tolist() for found in from_stock_rows(samples, rows)] == [s.tolist() for s in scored]
    with pytest.raises(InvalidBodyError, match=r"expected \[2, 4\], got \[1, 4\]"):
        from_stock_rows(samples, rows[:1])


def test_the_dual_clip_and_a_reference_go_along() -> None:
    reference = np.array([0, 0, 0, -1, -2], np.float32)
    given_sample = sample()
    with_reference = type(given_sample)(
        **{
            name: getattr(given_sample, name)
            for name in given_sample.__dataclass_fields__
            if name != "reference_logprobs"
        },
        reference_logprobs=reference,
    )
    loss = LossConfig(policy_loss=PolicyLoss.GRPO, dual_clip=3.0, kl_coef=0.1, kl_cap=10.0)
    tree = to_stock([with_reference], loss, Denominators.of([with_reference]), wants_logprobs=False)
    read = from_stock(decode_frame(encode_frame(tree)))
    assert (read.loss.dual_clip, read.loss.kl_coef, read.loss.kl_cap) == (3.0, 0.1, 10.0)
    found = read.samples[0].reference_logprobs
    assert found is not None
    assert found.tolist() == reference.tolist()
    with pytest.raises(InvalidBodyError, match="has no reference of its own"):
        to_stock([given_sample], loss, Denominators.of([given_sample]), wants_logprobs=False)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (LossConfig(policy_loss=PolicyLoss.CROSS_ENTROPY), "has no cross_entropy"),
        (LossConfig(temperature=0.7), "scores at 1.0 only, got 0.7"),
        (LossConfig(kl_coef=0.1), "clamps k3 at 10, got None"),
        (
            LossConfig(kl_coef=0.1, kl_cap=10.0, reduction=Reduction.DR_GRPO, dr_grpo_tokens=8),
            "cannot be divided",
        ),
    ],
)
def test_what_the_dialect_cannot_say_is_refused(loss: LossConfig, says: str) -> None:
    with pytest.raises(InvalidBodyError, match=says):
        to_stock([sample()], loss, Denominators.of([sample()]), wants_logprobs=False)


def test_branches_of_a_rollout_are_refused_where_the_loss_speaks_of_rollouts() -> None:
    branches = [sample("a"), sample("a", size=7)]
    counts = Denominators.of(branches)
    with pytest.raises(InvalidBodyError, match="rollout a has several branches"):
        to_stock(branches, LossConfig(), counts, wants_logprobs=False)
    of_tokens = LossConfig(policy_loss=PolicyLoss.GRPO, reduction=Reduction.TOKEN_MEAN)
    assert to_stock(branches, of_tokens, counts, wants_logprobs=False)
