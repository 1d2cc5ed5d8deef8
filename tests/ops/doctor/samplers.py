"""A small honest policy that samples, and the ways in which a sampler can break its word."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.fakes import END

from pilotage.errors import ContextExceededError, SamplerError
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds, token_ids

VOCABULARY = 40


@dataclass(slots=True, kw_only=True)
class HonestSampler:
    """Samples from logits that depend on the last id and the place; its parts are methods, to break one."""

    max_context_tokens: int = 512
    _entropy: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """Sample as the Protocol says."""
        room = self.room(prompt_ids)
        rng = self.random(params.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < min(params.max_tokens, room) and not self.stops_after(ids):
            logits = self.logits(int(prompt_ids[-1]), prompt_ids.size + len(ids))
            kept = self.kept(logits, params)
            chosen = int(np.argmax(kept + rng.gumbel(size=kept.size)))
            ids.append(chosen)
            logprobs.append(float(self.logprobs(logits, params)[chosen]))
        return self.answer(ids, logprobs)

    def room(self, prompt_ids: TokenIds) -> int:
        """Return how many tokens fit after the prompt."""
        room = self.max_context_tokens - prompt_ids.size
        if room < 1:
            raise ContextExceededError("the prompt fills the window")
        return room

    def random(self, seed: int | None) -> np.random.Generator:
        """Return what the draws of a call come from."""
        return np.random.default_rng(seed)

    def stops_after(self, ids: list[int]) -> bool:
        """Return whether sampling ends."""
        return bool(ids) and ids[-1] == END

    def logits(self, last: int, place: int) -> NDArray[np.float64]:
        """Return the policy's logits; END grows likelier with the place."""
        logits = np.random.default_rng([last, place]).normal(0, 1.5, VOCABULARY)
        logits[END] += 0.5
        return logits

    def kept(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        """Return log-weights of the draw, after temperature and top_p."""
        if params.temperature == 0 or params.top_p < 1e-3:
            return np.where(logits == logits.max(), 0.0, -np.inf)
        return logits / params.temperature

    def logprobs(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        """Return log-probs at the sampling temperature."""
        scaled = logits / (params.temperature or 1.0)
        return scaled - np.logaddexp.reduce(scaled)

    def answer(self, ids: list[int], logprobs: list[float]) -> Completion:
        """Return the completion of what was sampled."""
        has_stopped = bool(ids) and ids[-1] == END
        return Completion(
            token_ids=token_ids(ids),
            logprobs=np.array(logprobs, np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        )


class Down(HonestSampler):
    def room(self, prompt_ids: TokenIds) -> int:
        raise SamplerError("the engine is gone")


class Talkative(HonestSampler):
    """Answers a token more than was asked for, except where one was asked for."""

    def answer(self, ids: list[int], logprobs: list[float]) -> Completion:
        extra = 30 if len(ids) > 1 else 0
        return HonestSampler.answer(self, [1] * extra + ids, [-1.0] * extra + logprobs)


class Raw(HonestSampler):
    def logprobs(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        return logits - np.logaddexp.reduce(logits)


class WithoutLogprobs(HonestSampler):
    def logprobs(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        return np.zeros(VOCABULARY)


class Infinite(HonestSampler):
    def answer(self, ids: list[int], logprobs: list[float]) -> Completion:
        return HonestSampler.answer(self, ids, [*logprobs[:-1], float("nan")] if len(ids) > 1 else logprobs)


class DeafToTemperature(HonestSampler):
    def kept(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        return HonestSampler.kept(self, logits, SamplingParams(top_p=params.top_p))


class AlwaysGreedy(HonestSampler):
    def kept(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        return HonestSampler.kept(self, logits, SamplingParams(temperature=0.0))


class DeafToTopP(HonestSampler):
    def kept(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        return HonestSampler.kept(self, logits, SamplingParams(temperature=params.temperature))


class RefusesTopP(HonestSampler):
    def kept(self, logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
        if params.top_p < 1:
            raise SamplerError("top_p is 1 here")
        return HonestSampler.kept(self, logits, params)


class DeafToSeed(HonestSampler):
    def random(self, seed: int | None) -> np.random.Generator:
        return self._entropy


class StripsEnd(HonestSampler):
    def answer(self, ids: list[int], logprobs: list[float]) -> Completion:
        whole = HonestSampler.answer(self, ids, logprobs)
        if whole.finish_reason is FinishReason.LENGTH or len(ids) == 1:
            return whole
        return Completion(
            token_ids=token_ids(ids[:-1]),
            logprobs=np.array(logprobs[:-1], np.float32),
            weights_versions=np.zeros(len(ids) - 1, np.int32),
            finish_reason=FinishReason.STOP,
        )


class RunsOn(HonestSampler):
    def stops_after(self, ids: list[int]) -> bool:
        return False


class CutsPrompts(HonestSampler):
    def room(self, prompt_ids: TokenIds) -> int:
        return max(1, self.max_context_tokens - prompt_ids.size)


class FailsOnLongPrompts(HonestSampler):
    def room(self, prompt_ids: TokenIds) -> int:
        if prompt_ids.size >= self.max_context_tokens:
            raise SamplerError("out of memory")
        return HonestSampler.room(self, prompt_ids)
