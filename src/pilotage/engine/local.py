"""Sampler and trainer in this process: the backend of a laptop, a test and a first run.

Two threads and an asyncio face. The sampling thread owns the decoder; a worker thread owns the trainer, one
verb at a time. They meet in `publish`: the trainer stands still, the sampler takes over its weights between
two rounds, and a canary proves that both now give the same log-probs.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pilotage.algorithms import WeightsVersions
from pilotage.engine.checkpoint import Manifest, read_undamaged, write_checkpoint
from pilotage.engine.decoder import Decoder
from pilotage.engine.fused import FusedDecoder, Layout
from pilotage.engine.lora import LoraOptions
from pilotage.engine.module_decoder import ModuleDecoder
from pilotage.engine.policy import check_model_dir, copy_tokenizer, eos_token_ids
from pilotage.engine.sampling_loop import SamplingLoop
from pilotage.engine.trainer import TorchTrainer
from pilotage.errors import ConfigError, TrainerError
from pilotage.types import (
    AdamParams,
    Completion,
    Denominators,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Sample,
    SamplingParams,
    StepResult,
    TokenIds,
)

_CANARY_TOKENS = 24
_CANARY_DECODED = 8
"""The last so many canary tokens go through the decode step, those before through prefill."""
_CANARY_TOLERANCE = 1e-3
"""Nats. Sums in another order differ by about 1e-5; wrong, mixed up or missing weights by 0.01 and more."""


class LocalEngine:
    """Implements `Sampler` and `Trainer` on one device."""

    def __init__(
        self, *, trainer: TorchTrainer, loop: SamplingLoop, model_dir: Path, trainer_threads: int
    ) -> None:
        self._trainer = trainer
        self._loop = loop
        self._model_dir = model_dir
        self._trainer_threads = trainer_threads
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pilotage-trainer")
        self._versions = WeightsVersions()

    @classmethod
    async def open(
        cls,
        model_dir: Path,
        *,
        max_context_tokens: int,
        max_batch: int,
        stop_token_ids: Sequence[int] | None = None,
        device: str | None = None,
        trainer_threads: int = 1,
        micro_batch_tokens: int = 4096,
        lora: LoraOptions | None = None,
    ) -> "LocalEngine":
        """Load a Hugging Face causal language model for sampling and training.

        Args:
            max_context_tokens: most tokens of prompt and completion together.
            max_batch: most completions that are sampled at once; others wait.
            stop_token_ids: ids that end a completion; None reads them from the model's config.
            device: None is the first CUDA device, or else the CPU.
            trainer_threads: intra-op threads of the trainer; the sampler always has one.
            micro_batch_tokens: tokens of one forward pass of the trainer, a shared prefix counted once.
            lora: adapters to train instead of the weights.

        Raises:
            ConfigError: the directory is no usable model or a damaged checkpoint, the adapters do not fit it,
                or nothing would ever stop it.
        """
        check_model_dir(model_dir)
        stops = eos_token_ids(model_dir) if stop_token_ids is None else tuple(stop_token_ids)
        if not stops:
            raise ConfigError(f"{model_dir} names no eos_token_id; give stop_token_ids")
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

        def build() -> LocalEngine:
            read_undamaged(model_dir, weights_only=True)
            trainer = TorchTrainer(model_dir, device=chosen, micro_batch_tokens=micro_batch_tokens, lora=lora)
            decoder = build_decoder(
                trainer.module, max_context_tokens=max_context_tokens, max_batch=max_batch
            )
            loop = SamplingLoop(decoder, stop_token_ids=stops, max_context_tokens=max_context_tokens)
            return cls(trainer=trainer, loop=loop, model_dir=model_dir, trainer_threads=trainer_threads)

        engine = await asyncio.to_thread(build)
        try:
            await engine._hand_over()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._loop.max_context_tokens

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a completion."""
        return self._loop.stop_token_ids

    @property
    def weights_version(self) -> int:
        """Version of the weights that the sampler uses."""
        return self._loop.weights_version

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. Contexts are found by their ids, so `session_id` is not needed here."""
        return await asyncio.wrap_future(self._loop.submit(prompt_ids, params, turn_index=turn_index))

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """See `Trainer`."""
        return await self._train(
            lambda: self._trainer.forward_backward(samples, loss, denominators=denominators)
        )

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """See `Trainer`."""
        return await self._train(lambda: self._trainer.forward(samples, temperature=temperature))

    async def step(self, params: AdamParams) -> StepResult:
        """See `Trainer`."""
        result = await self._train(lambda: self._trainer.step(params))
        self._versions.changed()
        return result

    async def discard(self) -> None:
        """See `Trainer`."""
        await self._train(self._trainer.discard)

    async def publish(self) -> int:
        """Hand the trainer's weights to the sampler, and prove that they arrived.

        Completions under way go on under the new weights, with their contexts computed again. After `load`
        of a checkpoint whose weights had been published, they keep the version they had.

        Raises:
            TrainerError: sampler and trainer disagree on a fixed sequence.
        """
        version = self._versions.advance()
        await self._hand_over()
        self._versions.published()
        return version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Trainer`."""
        manifest = Manifest.of(self._versions)

        def write(partial: Path) -> None:
            self._trainer.save_state(partial, weights_only=weights_only)
            copy_tokenizer(self._model_dir, partial)

        await self._train(lambda: write_checkpoint(directory, manifest, write))

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Engine`. A plain model directory, or with LoRA a plain adapter directory, gives its weights, a
        fresh optimizer and version 0.
        """

        def read() -> Manifest:
            manifest = read_undamaged(directory, weights_only=weights_only)
            self._trainer.load_state(directory, weights_only=weights_only)
            return manifest

        manifest = await self._train(read)
        self._versions.restored(manifest.weights_version, is_published=manifest.is_published)

    async def close(self) -> None:
        """End both threads; calls that wait fail."""
        await asyncio.to_thread(self._loop.close)
        await asyncio.to_thread(self._worker.shutdown)

    async def _train[T](self, work: Callable[[], T]) -> T:
        """Run one trainer verb on the worker thread."""

        def with_threads() -> T:
            torch.set_num_threads(self._trainer_threads)
            try:
                return work()
            finally:
                torch.set_num_threads(1)  # the sampler's share; some libraries count for the process

        return await asyncio.get_running_loop().run_in_executor(self._worker, with_threads)

    async def _hand_over(self) -> None:
        """Copy weights trainer -> sampler, and compare both on the canary."""

        def hand_over() -> None:
            version = self._versions.current
            ids = _canary_ids(self._trainer.module.config.vocab_size, self.max_context_tokens)
            expected = self._trainer.logprobs(ids)[-_CANARY_DECODED:]

            def load(decoder: Decoder) -> None:
                decoder.load(self._trainer.module)
                gap = float(np.abs(_score(decoder, ids) - expected).max())
                if not gap < _CANARY_TOLERANCE:  # also catches NaN
                    raise TrainerError(
                        f"at weights version {version} sampler and trainer differ by {gap:.3g} nats on a"
                        f" fixed sequence, more than {_CANARY_TOLERANCE}; the sampler has other weights"
                    )
                self._loop.weights_version = version

            self._loop.between_rounds(load).result()

        await self._train(hand_over)


def build_decoder(module: PreTrainedModel, *, max_context_tokens: int, max_batch: int) -> Decoder:
    """Choose the fused decoder where it knows the model, or else the module itself."""
    num_slots = 2 * max_batch  # as many again as decode: contexts whose agents are running a tool
    layout = Layout.of(module.config)
    with torch.inference_mode():
        if layout is None:
            return ModuleDecoder(module, max_batch=max_batch, num_kept=num_slots)
        return FusedDecoder(
            module, layout, max_context_tokens=max_context_tokens, max_batch=max_batch, num_slots=num_slots
        )


def _canary_ids(vocab_size: int, max_context_tokens: int) -> TokenIds:
    size = min(_CANARY_TOKENS, max_context_tokens)
    return np.random.default_rng(0).integers(0, vocab_size, size).astype(np.int32)


def _score(decoder: Decoder, ids: TokenIds) -> NDArray[np.float64]:
    """Return the decoder's log-probs of the last `_CANARY_DECODED` ids, prefilled and then decoded."""
    fed = ids.size - _CANARY_DECODED
    lease = decoder.acquire(ids[: fed - 1])
    assert lease is not None
    while not lease.is_computed:
        decoder.prefill([lease], budget_tokens=ids.size)
    decoder.enter(lease)
    scores: list[float] = []
    for position in range(fed, ids.size):
        logits_1V = decoder.decode(ids[position - 1 : position].astype(np.int64))
        scores.append(float(torch.log_softmax(logits_1V.float(), dim=-1)[0, int(ids[position])]))
    decoder.leave(0)
    return np.array(scores)
