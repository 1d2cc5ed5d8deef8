"""A vLLM engine as a sampler replica: token ids in, token ids and their log-probs out.

vLLM is asked for the log-probs of its processed logits, which are those at the sampling temperature, and for
no text: it needs no tokenizer. Stop tokens are ours alone (`ignore_eos`), and are part of the answer.

While weights change, requests under way are frozen with their tokens, and caches are dropped at that moment:
what follows is computed under the new weights. A token carries the version that was set when it arrived; all
tokens of old weights have arrived when a pause is answered.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from pilotage.engine.draws import draw_key
from pilotage.errors import ConfigError, ContextExceededError, PilotageError, SamplerError
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SEED_BITS = 63
"""vLLM's seeds are signed 64-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How a vLLM engine is started."""

    model_dir: Path
    max_context_tokens: int
    max_batch: int
    """Most completions that are sampled at once; others wait."""
    stop_token_ids: tuple[int, ...]
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    weight_backend: Literal["nccl", "ipc"] = "nccl"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class VllmEngine(Protocol):
    """The calls of vLLM's AsyncLLM that are used here."""

    def generate(
        self, prompt: Mapping[str, object], sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        """Yield outputs, each with the tokens since the last; closing it aborts the request."""
        ...

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop scheduling."""
        ...

    async def resume_generation(self) -> None:
        """Go on."""
        ...

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Join the trainer's channel."""
        ...

    async def start_weight_update(self) -> None:
        """Make ready to receive weights in checkpoint format."""
        ...

    async def update_weights(self, request: Any) -> None:
        """Receive weights."""
        ...

    async def finish_weight_update(self) -> None:
        """Put what was received into use."""
        ...

    def shutdown(self) -> None:
        """End its processes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConnection:
    """A running engine with the makers of what it is asked."""

    engine: VllmEngine
    sampling_params: Callable[..., Any]
    init_request: Callable[..., Any]
    update_request: Callable[..., Any]


def connect_vllm(settings: VllmSettings) -> VllmConnection:
    """Start vLLM in processes of its own.

    Raises:
        ConfigError: vLLM is not installed.
    """
    try:
        from vllm import AsyncEngineArgs, SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "sampling with vLLM needs the extra pilotage[gpu] in the service's own environment; it cannot be"
            " installed beside pilotage[agents]"
        ) from error
    arguments = AsyncEngineArgs(
        model=str(settings.model_dir),
        skip_tokenizer_init=True,
        generation_config="vllm",  # nothing of the model's own sampling settings
        dtype=settings.dtype,
        max_model_len=settings.max_context_tokens,
        max_num_seqs=settings.max_batch,
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="mp",  # on the GPUs that its actor was given; Ray placed that
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=settings.weight_backend),
        disable_log_stats=True,
    )
    return VllmConnection(
        engine=AsyncLLM.from_engine_args(arguments),
        sampling_params=partial(
            SamplingParams,
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
        init_request=WeightTransferInitRequest,
        update_request=WeightTransferUpdateRequest,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """What has arrived of one completion."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None

    def add(self, output: Any, version: int) -> None:
        """Append the tokens of one output of vLLM."""
        [part] = output.outputs
        tokens: Sequence[int] = part.token_ids
        self.token_ids += tokens
        self.logprobs += [
            entry[token].logprob for token, entry in zip(tokens, part.logprobs or (), strict=True)
        ]
        self.versions += [version] * len(tokens)
        self.finish_reason = part.finish_reason

    def completion(self) -> Completion:
        """Return the whole, or say what is wrong with it."""
        reason = _FINISH_REASONS.get(self.finish_reason or "")
        if reason is None or not self.token_ids:
            raise SamplerError(
                f"vLLM ended a request after {len(self.token_ids)} tokens with {self.finish_reason!r};"
                " it may be repeated"
            )
        return Completion(
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            weights_versions=np.array(self.versions, np.int32),
            finish_reason=reason,
        )


class VllmSampler:
    """Implements `Sampler` on one vLLM engine, and takes new weights while requests wait."""

    def __init__(
        self,
        settings: VllmSettings,
        *,
        connect: Callable[[VllmSettings], VllmConnection] = connect_vllm,
    ) -> None:
        self._settings = settings
        self._connection = connect(settings)
        self._engine = self._connection.engine
        self.weights_version = 0

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._settings.max_context_tokens

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. Contexts are found by their ids, so `session_id` is not needed here."""
        room = self.max_context_tokens - prompt_ids.size
        if room < 1:
            raise ContextExceededError(
                f"the prompt has {prompt_ids.size} tokens and the context window {self.max_context_tokens};"
                " a completion needs room for one more"
            )
        wanted = self._connection.sampling_params(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=min(params.max_tokens, room),
            seed=draw_key(params.seed, turn_index) >> (64 - _SEED_BITS),
            stop_token_ids=list(self._settings.stop_token_ids),
        )
        answer = _Answer()
        prompt = {"prompt_token_ids": prompt_ids.tolist()}
        try:
            # Leaving the block, cancelled or not, closes the generator, which aborts what is unfinished.
            async with aclosing(self._engine.generate(prompt, wanted, uuid.uuid4().hex)) as outputs:
                async for output in outputs:
                    answer.add(output, self.weights_version)
        except PilotageError:
            raise
        except Exception as error:  # vLLM's errors share no class; here they get their name
            raise SamplerError(f"vLLM failed: {type(error).__name__}: {error}") from error
        return answer.completion()

    async def pause(self) -> None:
        """Freeze what is under way and drop all caches, which belong to the old weights."""
        await self._engine.pause_generation(mode="keep", clear_cache=True)

    async def resume(self, weights_version: int) -> None:
        """Go on under new weights, which have arrived."""
        self.weights_version = weights_version
        await self._engine.resume_generation()

    async def init_weight_transfer(self, init_info: Mapping[str, object]) -> None:
        """Join the trainer's channel; called by the trainer's side of it."""
        await self._engine.init_weight_transfer_engine(
            self._connection.init_request(init_info=dict(init_info))
        )

    async def start_weight_update(self) -> None:
        """Make ready to receive."""
        await self._engine.start_weight_update()

    async def update_weights(self, update_info: Mapping[str, object]) -> None:
        """Receive what the trainer sends at the same time."""
        await self._engine.update_weights(self._connection.update_request(update_info=dict(update_info)))

    async def finish_weight_update(self) -> None:
        """Put what was received into use."""
        await self._engine.finish_weight_update()

    async def close(self) -> None:
        """End vLLM's processes."""
        await asyncio.to_thread(self._engine.shutdown)
