"""The losses once more, token by token in plain Python, as their papers write them.

Nothing is shared with the code under test but the records. `moved` gives log-probs other than those at which
stopped gradients are taken, so that differences of this function are the gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import TrainedTokens
from pilotage.types import Denominators, LossConfig, PolicyLoss, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The trained tokens of one rollout."""

    logprobs: list[float]
    behaviour: list[float]
    advantages: list[float]
    reference: list[float]


def plain_loss(
    sequences: Sequence[Trained],
    config: LossConfig,
    moved: Sequence[Sequence[float]] | None = None,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> float:
    num_tokens = num_tokens or sum(len(s.logprobs) for s in sequences)
    num_sequences = num_sequences or sum(1 for s in sequences if s.logprobs)
    total = 0.0
    for index, sequence in enumerate(sequences):
        logprobs = sequence.logprobs if moved is None else moved[index]
        size = len(logprobs)
        for at in range(size):
            if config.reduction is Reduction.TOKEN_MEAN:
                weight = 1 / num_tokens
            elif config.reduction is Reduction.SEQUENCE_MEAN:
                weight = 1 / size / num_sequences
            else:
                weight = 1 / num_sequences / config.dr_grpo_tokens
            total += weight * _token_loss(sequence, logprobs, at, config)
    return total


def _token_loss(sequence: Trained, logprobs: Sequence[float], at: int, config: LossConfig) -> float:
    behaviour = sequence.logprobs if config.on_policy else sequence.behaviour
    advantage = sequence.advantages[at]
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = math.exp(logprobs[at] - behaviour[at])
    if config.policy_loss is PolicyLoss.GSPO:
        gaps = [new - old for new, old in zip(logprobs, behaviour, strict=True)]
        ratio = math.exp(sum(gaps) / len(gaps))
    if config.policy_loss is PolicyLoss.CROSS_ENTROPY:
        loss = -logprobs[at]
    elif config.policy_loss is PolicyLoss.CISPO:
        stopped = math.exp(sequence.logprobs[at] - behaviour[at])
        loss = -min(max(stopped, low), high) * advantage * logprobs[at]
    elif config.policy_loss is PolicyLoss.ICEPOP:
        stopped = math.exp(sequence.logprobs[at] - behaviour[at])
        loss = -(stopped if low <= stopped <= high else 0.0) * advantage * logprobs[at]
    elif config.policy_loss in (PolicyLoss.TIS_SEQUENCE, PolicyLoss.MIS_SEQUENCE):
        product = math.prod(
            math.exp(new - old) for new, old in zip(sequence.logprobs, behaviour, strict=True)
        )
        if config.policy_loss is PolicyLoss.TIS_SEQUENCE:
            weight = min(max(product, low), high)
        else:
            weight = product if low <= product <= high else 0.0
        loss = -weight * advantage * logprobs[at]
    else:
        loss = max(-ratio * advantage, -min(max(ratio, low), high) * advantage)
        if config.dual_clip is not None and advantage < 0:
            loss = min(loss, config.dual_clip * -advantage)
    if config.kl_coef:
        d = sequence.reference[at] - logprobs[at]
        k3 = math.exp(d) - d - 1
        loss += config.kl_coef * (k3 if config.kl_cap is None else min(k3, config.kl_cap))
    return loss


def plain_gradient(
    sequences: Sequence[Trained],
    config: LossConfig,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> list[float]:
    """Central differences; a clip border lies within the step of a random ratio about once in a million."""
    step = 1e-6
    gradient: list[float] = []
    for index, sequence in enumerate(sequences):
        for at in range(len(sequence.logprobs)):
            values: list[float] = []
            for shift in (step, -step):
                moved = [list(s.logprobs) for s in sequences]
                moved[index][at] += shift
                counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
                values.append(plain_loss(sequences, config, moved, **counts))
            gradient.append((values[0] - values[1]) / (2 * step))
    return gradient


def random_sequences(rng: np.random.Generator, *, spread: float = 0.4) -> list[Trained]:
    """One to four rollouts of one to six trained tokens; one advantage a rollout, as GSPO has it."""
    sequences: list[Trained] = []
    for _ in range(rng.integers(1, 5)):
        size = int(rng.integers(1, 7))
        logprobs = -rng.exponential(1.5, size)
        sequences.append(
            Trained(
                logprobs=logprobs.tolist(),
                behaviour=(logprobs + rng.normal(scale=spread, size=size)).tolist(),
                advantages=[float(rng.normal())] * size,
                reference=(logprobs + rng.normal(scale=2 * spread, size=size)).tolist(),
            )
        )
    return sequences


def as_tokens(sequences: Sequence[Trained]) -> tuple[TrainedTokens, NDArray[np.float64], NDArray[np.float64]]:
    """Return what the code under test reads: tokens, log-probs, reference log-probs."""
    sizes = [len(s.logprobs) for s in sequences]
    tokens = TrainedTokens(
        sequence_n=np.repeat(np.arange(len(sizes)), sizes).astype(np.int64),
        sampler_logprobs_n=np.concatenate([s.behaviour for s in sequences]),
        advantages_n=np.concatenate([s.advantages for s in sequences]),
    )
    logprobs = np.concatenate([s.logprobs for s in sequences])
    return tokens, logprobs, np.concatenate([s.reference for s in sequences])


def counts_of(sequences: Sequence[Trained]) -> Denominators:
    return Denominators(
        trained_tokens=sum(len(s.logprobs) for s in sequences),
        num_sequences=sum(1 for s in sequences if s.logprobs),
    )
