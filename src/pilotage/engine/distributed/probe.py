"""Proof that a sampler has the trainer's weights: it continues fixed prompts greedily, the trainer scores
the same tokens, and the log-probs must agree. Whatever differs, weights, cache or names, shows here.

It cannot see a change that is smaller than the noise between two implementations, so in bfloat16 it tells
wrong, mixed up or missing weights from right ones, and not one small step from the next.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pilotage.errors import TrainerError
from pilotage.types import Completion, Logprobs, Sample, SamplingParams, TokenIds

TOLERANCE_FLOAT32 = 1e-3
"""Nats, mean over the probe's tokens. Sums in another order differ by about 1e-5."""
TOLERANCE_BFLOAT16 = 0.1
"""Nats. Two bfloat16 implementations differ by about 0.01."""
_NUM_PROMPTS = 3
_PROMPT_TOKENS = 12
_GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Answers(Protocol):
    """What a probe needs of a sampler."""

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`."""
        ...


async def probe(sampler: Answers, *, vocab_size: int) -> list[Sample]:
    """Let a sampler continue the prompts; its log-probs are in the samples, at temperature 1."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for number in range(_NUM_PROMPTS):
        prompt = rng.integers(0, vocab_size, _PROMPT_TOKENS).astype(np.int32)
        name = f"probe-{number}"
        completion = await sampler.sample(prompt, _GREEDY, session_id=name, turn_index=0)
        samples.append(_to_sample(name, prompt, completion))
    return samples


def check(
    samples: Sequence[Sample], trainer_logprobs: Sequence[Logprobs], *, version: int, tolerance: float
) -> None:
    """Compare a probe with the trainer's log-probs at temperature 1.

    Raises:
        TrainerError: they differ, or the tokens were sampled under another version.
    """
    versions = {int(each) for sample in samples for each in sample.weights_versions[sample.loss_mask]}
    if versions != {version}:
        raise TrainerError(f"after publishing weights version {version} a sampler answered under {versions}")
    differences = [
        np.abs(sample.sampler_logprobs - logprobs)[sample.loss_mask]
        for sample, logprobs in zip(samples, trainer_logprobs, strict=True)
    ]
    gap = float(np.concatenate(differences).mean())
    if not gap < tolerance:  # also catches NaN
        raise TrainerError(
            f"at weights version {version} a sampler and the trainer differ by {gap:.3g} nats a token on a"
            f" greedy probe, more than {tolerance}; the sampler has other weights"
        )


def _to_sample(name: str, prompt: TokenIds, completion: Completion) -> Sample:
    """Mark the sampled tokens for scoring."""
    before, sampled = prompt.size, completion.token_ids.size
    return Sample(
        sequence_id=name,
        group_id="probe",
        token_ids=np.concatenate([prompt, completion.token_ids]),
        loss_mask=np.repeat([False, True], [before, sampled]),
        sampler_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        advantages=np.zeros(before + sampled, np.float32),
        weights_versions=np.concatenate([np.full(before, -1, np.int32), completion.weights_versions]),
    )
