"""Choosing tokens from logits: reproducible, whatever else is in the batch.

Every draw comes from a counter, not from a stream: draw j of a request is a function of (seed, turn, j).
So a request's draws do not depend on its neighbours. (Its logits do, in their last bits, because matrix
kernels add in another order for another batch size; about one draw in a million lies that close to the
border between two tokens.)
"""

import secrets
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotage.types import SamplingParams

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_TURN_GAMMA = 0xD1B54A32D192ED03


def draw_key(seed: int | None, turn_index: int) -> int:
    """Return the 64-bit start of a request's draws; without a seed it is fresh entropy."""
    if seed is None:
        return secrets.randbits(64)
    return _mix(_mix(seed & _MASK) + turn_index * _TURN_GAMMA)


def uniforms(keys_B: NDArray[np.uint64], counters_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return [B] numbers in [0, 1), 53 random bits each: draw `counter` of each key.

    Source: SplitMix64, G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014: its state is key + counter x gamma, so any draw can be computed by itself.
    """
    state = keys_B + (counters_B + np.uint64(1)) * np.uint64(_GAMMA)  # wraps, as intended
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser on one Python integer."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSettings:
    """Sampling settings of the B rows of a decode step, as tensors; rebuilt when a row joins or leaves."""

    divisor_B1: Tensor | None
    """[B, 1] temperature, 1 for greedy rows; None where all are 1."""
    is_greedy_B: Tensor | None
    """[B]; None where no row is greedy."""
    top_p_B1: Tensor | None
    """[B, 1]; None where no row restricts its vocabulary."""
    top_k_B1: Tensor | None
    """[B, 1] kept ids (the vocabulary's size where off); None as `top_p_B1`."""

    @classmethod
    def of(cls, params: list[SamplingParams], *, vocab_size: int, device: torch.device) -> "RowSettings":
        """Collect the settings of a batch, leaving out what no row asks for."""
        divisors = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0 for p in params]
        is_restricted = any(p.top_p < 1 or p.top_k for p in params)
        top_k = [p.top_k or vocab_size for p in params]
        return cls(
            divisor_B1=_column(divisors, device) if any(d != 1 for d in divisors) else None,
            is_greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_p_B1=_column([p.top_p for p in params], device) if is_restricted else None,
            top_k_B1=_column(top_k, device) if is_restricted else None,
        )


def _column(values: list[float] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device, dtype=torch.float32).unsqueeze(1)


def choose(
    logits_BV: Tensor, settings: RowSettings, uniforms_B: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Choose one token per row by inverting the cumulative distribution at the row's uniform.

    Returns:
        [B] ids and [B] their log-probs at the sampling temperature (1 for greedy rows), computed in
        float32, and over the kept ids where top_p or top_k restrict them.
    """
    scaled = logits_BV.float()
    if settings.divisor_B1 is not None:
        scaled = scaled / settings.divisor_B1
    logprobs_BV = torch.log_softmax(scaled, dim=-1)
    if settings.top_p_B1 is not None and settings.top_k_B1 is not None:
        logprobs_BV = _restrict(logprobs_BV, settings.top_p_B1, settings.top_k_B1)
    cumulative_BV = torch.cumsum(logprobs_BV.exp(), dim=-1, dtype=torch.float64)
    targets_B1 = torch.from_numpy(uniforms_B).to(logits_BV.device).unsqueeze(1) * cumulative_BV[:, -1:]
    ids_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    if settings.is_greedy_B is not None:
        best_B1 = scaled.argmax(dim=-1, keepdim=True)
        ids_B1 = torch.where(settings.is_greedy_B.unsqueeze(1), best_B1, ids_B1)
    chosen_B1 = logprobs_BV.gather(1, ids_B1)
    return ids_B1.squeeze(1).cpu().numpy(), chosen_B1.squeeze(1).cpu().numpy()


def _restrict(logprobs_BV: Tensor, top_p_B1: Tensor, top_k_B1: Tensor) -> Tensor:
    """Keep the `top_k` likeliest ids, of those the fewest whose mass reaches `top_p`; renormalise."""
    ordered, order = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(rank >= top_k_B1, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    # The first id is always kept; top_p = 1 keeps all, whatever the rounding of the sum.
    ordered = ordered.masked_fill((mass_before >= top_p_B1) & (top_p_B1 < 1), -torch.inf)
    kept = torch.log_softmax(ordered, dim=-1)
    return torch.empty_like(kept).scatter_(1, order, kept)
