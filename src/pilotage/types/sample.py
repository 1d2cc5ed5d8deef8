"""Flat tokens for the trainer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotage.types.arrays import Logprobs, Mask, TokenIds, Versions, freeze, require_shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One branch of one rollout, flattened. All arrays are aligned to `token_ids`.

    Position i of every other array speaks of token i itself (not of the token predicted at i); a trainer
    that predicts token i from tokens before it shifts on its own side. Token 0 is never trained.

        token_ids         P   P   A0   A1   T   A2
        loss_mask         F   F   T    T    F   T
        sampler_logprobs  0   0  -.1  -.3   0  -.2
        advantages        0   0  .5   .5    0  .5
    """

    sequence_id: str
    """The rollout; samples that share it are branches of one sequence, with one sequence ratio."""
    group_id: str
    token_ids: TokenIds
    """[L]"""
    loss_mask: Mask
    """[L] True where this sample trains the token; over all samples of a rollout at most once a token."""
    sampler_logprobs: Logprobs
    """[L] behaviour log-probs where `loss_mask`, 0 elsewhere."""
    advantages: NDArray[np.float32]
    """[L] advantage where `loss_mask`, 0 elsewhere."""
    weights_versions: Versions
    """[L] version that sampled the token where `loss_mask`, -1 elsewhere."""
    reference_logprobs: Logprobs | None = None
    """[L] under the KL term's reference where `loss_mask`, 0 elsewhere; None: the trainer asks its own."""

    def __post_init__(self) -> None:
        require_shape(
            "Sample",
            self.token_ids.size,
            loss_mask=self.loss_mask,
            sampler_logprobs=self.sampler_logprobs,
            advantages=self.advantages,
            weights_versions=self.weights_versions,
        )
        if self.loss_mask.size and self.loss_mask[0]:
            raise ValueError("Sample.loss_mask[0] is True, but nothing predicts the first token")
        if self.reference_logprobs is not None:
            require_shape("Sample", self.token_ids.size, reference_logprobs=self.reference_logprobs)
            freeze(self.reference_logprobs)
        freeze(self.token_ids, self.loss_mask, self.sampler_logprobs, self.advantages, self.weights_versions)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that this sample trains."""
        return int(self.loss_mask.sum())
