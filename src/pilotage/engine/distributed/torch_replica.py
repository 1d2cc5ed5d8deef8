"""The embedded engine's sampler as a replica of a larger engine: for machines without a GPU."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pilotage.engine.decoder import Decoder
from pilotage.engine.local import build_decoder
from pilotage.engine.modules import load_module
from pilotage.engine.sampling_loop import SamplingLoop
from pilotage.types import Completion, SamplingParams, TokenIds


class TorchReplica:
    """Implements `Sampler` on one device, and takes new weights between two rounds."""

    def __init__(
        self, model_dir: Path, *, max_context_tokens: int, max_batch: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._module = load_module(model_dir, device=torch.device("cpu"))
        decoder = build_decoder(self._module, max_context_tokens=max_context_tokens, max_batch=max_batch)
        self._loop = SamplingLoop(
            decoder, stop_token_ids=stop_token_ids, max_context_tokens=max_context_tokens
        )

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._loop.max_context_tokens

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. Contexts are found by their ids, so `session_id` is not needed here."""
        return await asyncio.wrap_future(self._loop.submit(prompt_ids, params, turn_index=turn_index))

    async def receive(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights; sampling goes on under the old ones, of which the decoder has a copy."""
        await asyncio.to_thread(self._load, weights)

    async def resume(self, weights_version: int) -> None:
        """Put the received weights into use between two rounds, under their version."""

        def switch(decoder: Decoder) -> None:
            decoder.load(self._module)
            self._loop.weights_version = weights_version

        await asyncio.wrap_future(self._loop.between_rounds(switch))

    async def close(self) -> None:
        """End the sampling thread."""
        await asyncio.to_thread(self._loop.close)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        """Fill the module; a tied weight is named once."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(weights[name])
