"""What a trainer is asked and what it answers: the verbs forward_backward and step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pilotage.types.arrays import Logprobs
from pilotage.types.sample import Sample


class PolicyLoss(StrEnum):
    """Which objective."""

    GRPO = "grpo"
    """PPO clip on the token ratio."""
    GSPO = "gspo"
    """Clip on the sequence ratio, over all sampled tokens of a rollout."""
    CISPO = "cispo"
    """Log-prob weighted by the clipped token ratio, which takes no gradient: every token keeps one."""
    ICEPOP = "icepop"
    """Log-prob weighted by the token ratio where that is within the clip, by 0 where it is not."""
    TIS_SEQUENCE = "tis_sequence"
    """Truncated importance sampling: log-prob weighted by the clipped ratio of the whole rollout, the product
    over its sampled tokens. (Of single tokens, this is `cispo`.)"""
    MIS_SEQUENCE = "mis_sequence"
    """Masked importance sampling: the same ratio where it is within the clip, 0 where it is not."""
    CROSS_ENTROPY = "cross_entropy"
    """Supervised: minus the log-prob of every token under the mask; advantages and ratios are not read."""


class Reduction(StrEnum):
    """How token losses become one number. Denominators count the whole batch, never a micro-batch."""

    TOKEN_MEAN = "token_mean"
    """Sum over trained tokens / number of trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over a rollout's trained tokens, then mean over rollouts that have a trained token."""
    DR_GRPO = "dr_grpo"
    """Sum over trained tokens / (number of rollouts with a trained token x `dr_grpo_tokens`). With 1 it is
    the sum over a rollout's tokens, then the mean over rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts of one whole batch. A caller that splits a batch gives those of the whole with every piece."""

    trained_tokens: int
    num_sequences: int
    """Rollouts with at least one trained token."""

    def __post_init__(self) -> None:
        if self.trained_tokens < 0 or self.num_sequences < 0:
            raise ValueError(f"counts cannot be negative, got {self.trained_tokens}, {self.num_sequences}")

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Denominators":
        """Count a batch."""
        trained = [sample for sample in samples if sample.trained_tokens]
        return cls(
            trained_tokens=sum(sample.trained_tokens for sample in trained),
            num_sequences=len({sample.sequence_id for sample in trained}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Loss of one forward_backward."""

    policy_loss: PolicyLoss = PolicyLoss.GSPO
    reduction: Reduction = Reduction.SEQUENCE_MEAN
    clip_low: float = 3e-4
    """The ratio is clipped below 1 - clip_low (1 is no lower clip: a ratio is positive) ..."""
    clip_high: float = 4e-4
    """... and above 1 + clip_high."""
    dual_clip: float | None = None
    """Of GRPO and GSPO: where the advantage is negative, the ratio is clipped above this, which is over 1."""
    on_policy: bool = False
    """Whether the weights that are trained are those that sampled: the ratio is 1, and behaviour log-probs
    are not read. Without it a ratio loss needs them."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference) on trained tokens; 0 needs no reference."""
    kl_cap: float | None = None
    """A token's k3 estimate counts at most this, and has no gradient above it; absent is exact."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's logits are divided by it before the softmax."""
    dr_grpo_tokens: int = 1024
    """The constant length of Dr.GRPO; read only by that reduction."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or not self.clip_high > 0:
            raise ValueError(f"clip_low in (0, 1], clip_high > 0; got {self.clip_low}, {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be over 1, got {self.dual_clip}")
        if self.dual_clip is not None and self.policy_loss not in (PolicyLoss.GRPO, PolicyLoss.GSPO):
            raise ValueError(f"{self.policy_loss} has no dual_clip; leave it out")
        if self.kl_cap is not None and not self.kl_cap > 0:
            raise ValueError(f"kl_cap must be positive, got {self.kl_cap}")
        if self.dr_grpo_tokens < 1:
            raise ValueError(f"dr_grpo_tokens must be positive, got {self.dr_grpo_tokens}")
        if self.temperature <= 0:
            raise ValueError(f"a ratio needs temperature > 0, got {self.temperature}")

    @property
    def reads_sampler_logprobs(self) -> bool:
        """Whether samples must carry behaviour log-probs."""
        return not self.on_policy and self.policy_loss is not PolicyLoss.CROSS_ENTROPY


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW settings of one step, all of them, so that none is silently kept by a server."""

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0 turns clipping off."""

    def __post_init__(self) -> None:
        values = (self.learning_rate, self.beta1, self.beta2, self.weight_decay, self.max_grad_norm)
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"Adam parameters are finite and not negative, got {self}")
        if self.beta1 >= 1 or self.beta2 >= 1 or not 0 < self.eps < math.inf:
            raise ValueError(f"beta1 < 1, beta2 < 1 and eps > 0; got {self.beta1}, {self.beta2}, {self.eps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardFigures:
    """What one forward_backward measured, over the samples that it was given."""

    loss: float
    trained_tokens: int
    forwarded_tokens: int
    """Of the forward passes; a prefix that samples share counts once where the engine computes it once."""
    num_sequences: int
    """Rollouts with at least one trained token."""
    logprob_gap_mean: float | None
    """Mean |trainer - sampler log-prob| on trained tokens; None where no ratio is formed: cross entropy,
    on-policy, or an empty batch."""
    logprob_gap_max: float | None
    gap_k3: float | None
    """Mean of exp(d) - d - 1 with d = trainer - sampler log-prob: k3 estimate of KL(sampler || trainer)."""
    clip_fraction: float | None
    """Share of trained tokens whose gradient the clip removed, or, for CISPO, whose weight it changed."""
    kl_to_reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult(ForwardBackwardFigures):
    """The figures, and what they were made from."""

    trainer_logprobs_n: Logprobs | None = field(default=None, compare=False)
    """[n] of the trained tokens, sample after sample, under the weights that the gradient is of; None from a
    service that does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step measured."""

    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    num_backwards: int
    """forward_backward calls that were accumulated into it."""
