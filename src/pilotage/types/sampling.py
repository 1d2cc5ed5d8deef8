"""What a sampler is asked and what it answers: ids in, ids out."""

from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from pilotage.types.arrays import Logprobs, TokenIds, Versions, freeze, require_shape


class FinishReason(StrEnum):
    """Why the sampler stopped."""

    STOP = "stop"
    """It sampled a stop token, which is the last of the ids."""
    LENGTH = "length"
    """It reached max_tokens or the end of the context window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one session; the recipe owns them, the agent does not.

    Training calls need top_p = 1 and top_k = 0: anything else renormalises the log-probs over the kept
    mass, and the importance ratio is off by that factor for every token.
    """

    temperature: float = 1.0
    """0 is greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    max_tokens: int = 1024
    """Most tokens of one turn; the proxy also clamps it to the context window."""
    seed: int | None = None
    """Seeds the session; turn i of a session draws from (seed, i). None draws fresh entropy."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must lie in [0, 10], got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {self.max_tokens}")

    def turn_seed(self, turn_index: int, *, bits: int) -> int | None:
        """Return a seed of one turn, for wires that know no turns; None where the session has none."""
        if self.seed is None:
            return None
        return int.from_bytes(sha256(f"{self.seed}/{turn_index}".encode()).digest()) >> (256 - bits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampler call's answer. Owns its arrays."""

    token_ids: TokenIds
    """[K] sampled ids, the stop token included where one was sampled."""
    logprobs: Logprobs
    """[K] under the policy that sampled, at the sampling temperature."""
    weights_versions: Versions
    """[K] version of the weights that each token was sampled under."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        require_shape(
            "Completion", self.token_ids.size, logprobs=self.logprobs, weights_versions=self.weights_versions
        )
        freeze(self.token_ids, self.logprobs, self.weights_versions)
