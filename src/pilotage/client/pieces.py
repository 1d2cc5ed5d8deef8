"""Batches in pieces: whole rollouts, each piece under a number of bytes, and results added up again."""

from collections.abc import Sequence

from pilotage.algorithms import in_order
from pilotage.types import ForwardBackwardResult, Sample

_BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 4
"""Id, mask, behaviour log-prob, advantage, version."""
_BYTES_PER_SAMPLE = 256
"""Paths, shapes and ids."""


def size_bytes(sample: Sample) -> int:
    """Return about how long a sample is on the wire, and never less than it is."""
    per_token = _BYTES_PER_TOKEN + (4 if sample.reference_logprobs is not None else 0)
    names = len(sample.sequence_id.encode()) + len(sample.group_id.encode())
    return sample.token_ids.size * per_token + 2 * names + _BYTES_PER_SAMPLE


def pieces(samples: Sequence[Sample], *, max_bytes: int) -> list[list[int]]:
    """Split a batch into pieces of whole rollouts, each under `max_bytes` where one rollout alone is.

    Returns:
        Indexes into `samples`, each once. Samples of one rollout that do not stand together are brought
        together at the first. An empty batch is one empty piece.
    """
    rollouts: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        rollouts.setdefault(sample.sequence_id, []).append(index)
    found: list[list[int]] = [[]]
    used = 0
    for rollout in rollouts.values():
        size = sum(size_bytes(samples[index]) for index in rollout)
        if found[-1] and used + size > max_bytes:
            found.append([])
            used = 0
        found[-1] += rollout
        used += size
    return found


def joined_results(
    samples: Sequence[Sample], parts: Sequence[tuple[Sequence[Sample], ForwardBackwardResult]]
) -> ForwardBackwardResult:
    """Add up what the pieces of one batch measured; means are weighted by trained tokens.

    The losses were computed with the denominators of the whole batch, so they add up to its loss.

    Args:
        samples: the whole batch.
        parts: the samples of each piece, and what was measured over them.
    """
    results = [result for _, result in parts]
    scored = [(piece, r.trainer_logprobs_n) for piece, r in parts if r.trainer_logprobs_n is not None]
    maxima = [result.logprob_gap_max for result in results if result.logprob_gap_max is not None]
    return ForwardBackwardResult(
        loss=sum(result.loss for result in results),
        trained_tokens=sum(result.trained_tokens for result in results),
        forwarded_tokens=sum(result.forwarded_tokens for result in results),
        num_sequences=sum(result.num_sequences for result in results),
        logprob_gap_mean=_mean([(r.logprob_gap_mean, r.trained_tokens) for r in results]),
        logprob_gap_max=max(maxima, default=None),
        gap_k3=_mean([(r.gap_k3, r.trained_tokens) for r in results]),
        clip_fraction=_mean([(r.clip_fraction, r.trained_tokens) for r in results]),
        kl_to_reference=_mean([(r.kl_to_reference, r.trained_tokens) for r in results]),
        trainer_logprobs_n=in_order(samples, scored) if len(scored) == len(parts) else None,
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the weighted mean of what is there; None where nothing is."""
    there = [(value, weight) for value, weight in values if value is not None and weight]
    if not there:
        return None
    return sum(value * weight for value, weight in there) / sum(weight for _, weight in there)
