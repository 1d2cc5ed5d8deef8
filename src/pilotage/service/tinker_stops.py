"""Stop ids and stop texts of a sampling call.

An engine stops at the ids of its model. Others are honoured by cutting the completion where the first of
them ends: what follows was sampled for nothing, and no log-prob of what is kept depends on it.
"""

import asyncio
from dataclasses import dataclass, replace

from pilotage.rendering import TokenizerFile
from pilotage.service.engine_host import EngineHost
from pilotage.service.refusals import Refusal
from pilotage.types import Completion, FinishReason
from pilotage.wire.core import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """What ends a completion, beside the model's own stop ids."""

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    tokenizer: TokenizerFile | None = None
    """Needed for texts."""

    async def cut(self, completion: Completion) -> Completion:
        """End a completion after the first token that completes a stop."""
        ids = completion.token_ids.tolist()
        if self.texts:
            size = await asyncio.to_thread(self._end, ids)
        else:
            size = next((end for end, token in enumerate(ids, 1) if token in self.ids), None)
        if size is None:
            return completion
        return replace(
            completion,
            token_ids=completion.token_ids[:size].copy(),
            logprobs=completion.logprobs[:size].copy(),
            weights_versions=completion.weights_versions[:size].copy(),
            finish_reason=FinishReason.STOP,
        )

    def _end(self, ids: list[int]) -> int | None:
        """Return how many ids it takes until their text holds a stop; None where it never does."""
        assert self.tokenizer is not None
        if not self._holds(ids):
            return None
        low, high = 1, len(ids)  # text only grows with its ids
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(ids[:middle]) else (middle + 1, high)
        return low

    def _holds(self, ids: list[int]) -> bool:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.texts)


def read_stops(stop: str | list[str] | list[int] | None, host: EngineHost) -> Stops:
    """Read what a call gives.

    Raises:
        Refusal: an empty list, which asks for no stop at all: the model's own always end a completion.
    """
    if stop is None:
        return Stops()
    given = [stop] if isinstance(stop, str) else stop
    if not given or "" in given:
        raise Refusal(
            ErrorCode.INVALID,
            f"the ids {list(host.stop_token_ids)} always end a completion; give other ids, texts, or none",
            path="sampling_params.stop",
        )
    texts = tuple(item for item in given if isinstance(item, str))
    if texts:
        return Stops(texts=texts, tokenizer=host.tokenizer)
    return Stops(ids=frozenset(item for item in given if isinstance(item, int)) - set(host.stop_token_ids))
