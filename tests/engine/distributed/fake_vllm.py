"""The few calls of vLLM's AsyncLLM that the sampler uses, on a real tiny model in this process.

It keeps what matters to a caller: outputs are deltas, a pause with `keep` freezes requests, keys of the
prefix cache are those of the weights that computed them until it is cleared, a closed generator is an abort,
and weights arrive between start and finish. Faults of a real engine can be switched on.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pilotage.engine.distributed.vllm_sampler import VllmConnection, VllmSettings
from pilotage.engine.modules import load_module


@dataclass(frozen=True, kw_only=True)
class FakeParams:
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: list[int]


@dataclass(frozen=True)
class FakeLogprob:
    logprob: float


@dataclass(frozen=True, kw_only=True)
class FakePart:
    token_ids: list[int]
    logprobs: list[dict[int, FakeLogprob]]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class FakeOutput:
    outputs: list[FakePart]


@dataclass(frozen=True, kw_only=True)
class FakeInitRequest:
    init_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FakeUpdateRequest:
    update_info: dict[str, Any]


@dataclass(kw_only=True)
class FakeVllm:
    """An engine with switches for what can go wrong."""

    model_dir: Path
    ignores_weights: bool = False
    """As vLLM's in-place reload does on a CPU."""
    fails_with: Exception | None = None
    ends_with: str | None = None
    """Finish reason of the first output, whatever was sampled."""
    running: set[str] = field(default_factory=set[str])
    aborted: list[str] = field(default_factory=list[str])
    asked: list[FakeParams] = field(default_factory=list[FakeParams])
    calls: list[str] = field(default_factory=list[str])
    is_shut_down: bool = False

    def __post_init__(self) -> None:
        self.module = load_module(self.model_dir, device=torch.device("cpu"))
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        self._received: dict[str, torch.Tensor] = {}

    async def generate(
        self, prompt: Mapping[str, object], sampling_params: Any, request_id: str
    ) -> AsyncGenerator[FakeOutput, None]:
        params: FakeParams = sampling_params
        self.asked.append(params)
        self.running.add(request_id)
        ids: list[int] = list(prompt["prompt_token_ids"])  # pyright: ignore
        generator = torch.Generator().manual_seed(params.seed)
        try:
            for number in range(1, params.max_tokens + 1):
                await self._goes_on.wait()
                await asyncio.sleep(0)
                if self.fails_with is not None:
                    raise self.fails_with
                logprobs = torch.log_softmax(self._logits(ids) / (params.temperature or 1.0), -1)
                greedy = int(logprobs.argmax())
                token = (
                    int(torch.multinomial(logprobs.exp(), 1, generator=generator))
                    if params.temperature
                    else greedy
                )
                ids.append(token)
                reason = "stop" if token in params.stop_token_ids else None
                reason = reason or ("length" if number == params.max_tokens else None) or self.ends_with
                entry = {
                    token: FakeLogprob(float(logprobs[token])),
                    greedy: FakeLogprob(float(logprobs.max())),
                }
                part = FakePart(token_ids=[token], logprobs=[entry], finish_reason=reason)
                yield FakeOutput(outputs=[part])
                if reason is not None:
                    self.running.discard(request_id)
                    return
        finally:
            if request_id in self.running:
                self.running.discard(request_id)
                self.aborted.append(request_id)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        self.calls.append("pause")
        self._goes_on.clear()
        if clear_cache:
            self._prefixes.clear()

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self._goes_on.set()

    async def init_weight_transfer_engine(self, request: FakeInitRequest) -> None:
        self.calls.append(f"init {sorted(request.init_info.items())}")

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        self._received = {}

    async def update_weights(self, request: FakeUpdateRequest) -> None:
        self.calls.append("update")
        self._received |= request.update_info

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")
        if not self.ignores_weights:
            self.module.load_state_dict(self._received, strict=False)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """Next-token logits, from the prefix cache where the context is known."""
        key = tuple(ids)
        if key not in self._prefixes:
            with torch.no_grad():
                self._prefixes[key] = self.module(input_ids=torch.tensor([ids])).logits[0, -1].float()
        return self._prefixes[key]


def connect_fake(engine: FakeVllm) -> Any:
    """Return what the sampler connects with."""

    def connect(settings: VllmSettings) -> VllmConnection:
        return VllmConnection(
            engine=engine,
            sampling_params=FakeParams,
            init_request=FakeInitRequest,
            update_request=FakeUpdateRequest,
        )

    return connect
