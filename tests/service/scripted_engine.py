"""An engine program for tests: a few floats as weights, no torch, so that it starts at once.

Its numbers are exact: the gradient is the sum of trained advantages, a step is `w -= lr * gradient`. A file
`fault` in the job's directory makes it fail on purpose: `open`, `die`, or `slow:SECONDS` for every verb.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pilotage.errors import ConfigError, ContextExceededError, TrainerError
from pilotage.service.engine_host import JobSpec
from pilotage.service.engine_process import serve_engine
from pilotage.types import (
    AdamParams,
    Completion,
    FinishReason,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Sample,
    SamplingParams,
    StepResult,
    TokenIds,
)
from pilotage.types.training import Denominators


class ScriptedEngine:
    """Implements `Engine` on a list of floats."""

    stop_token_ids = (0,)

    def __init__(self, spec: JobSpec) -> None:
        self._directory = spec.directory
        self.max_context_tokens = spec.body.max_context_tokens
        self.weights_version = 0
        self.weights = [1.0]
        self._gradient = 0.0
        self._num_backwards = 0

    async def _fault(self) -> None:
        path = self._directory / "fault"
        text = path.read_text() if path.exists() else ""
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("slow:"):
            await asyncio.sleep(float(text[5:]))

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        await self._fault()
        if prompt_ids.size >= self.max_context_tokens:
            raise ContextExceededError("no room after the prompt")
        count = min(params.max_tokens, 3)
        rng = np.random.default_rng([params.seed or 0, turn_index])
        return Completion(
            token_ids=rng.integers(1, 100, count).astype(np.int32),
            logprobs=np.full(count, -1.5, np.float32),
            weights_versions=np.full(count, self.weights_version, np.int32),
            finish_reason=FinishReason.LENGTH,
        )

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        await self._fault()
        self._gradient += float(sum(sample.advantages.sum() for sample in samples))
        self._num_backwards += 1
        tokens = sum(sample.trained_tokens for sample in samples)
        return ForwardBackwardResult(
            loss=self._gradient,
            trained_tokens=tokens,
            forwarded_tokens=sum(sample.token_ids.size for sample in samples),
            num_sequences=len({sample.sequence_id for sample in samples}),
            logprob_gap_mean=0.0,
            logprob_gap_max=0.0,
            gap_k3=0.0,
            clip_fraction=0.0,
            trainer_logprobs_n=np.full(tokens, -0.5, np.float32),
        )

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        return [np.where(sample.loss_mask, np.float32(-0.5), np.float32(0)) for sample in samples]

    async def step(self, params: AdamParams) -> StepResult:
        await self._fault()
        if not self._num_backwards:
            raise TrainerError("step without forward_backward: no gradient was accumulated")
        self.weights.append(self.weights[-1] - params.learning_rate * self._gradient)
        norm, count = abs(self._gradient), self._num_backwards
        self._gradient, self._num_backwards = 0.0, 0
        return StepResult(grad_norm=norm, learning_rate=params.learning_rate, num_backwards=count)

    async def discard(self) -> None:
        self._gradient, self._num_backwards = 0.0, 0

    async def publish(self) -> int:
        await self._fault()
        self.weights_version += 1
        return self.weights_version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        directory.mkdir(parents=True)  # noqa: ASYNC240 - a test
        state = {"weights": self.weights, "version": self.weights_version}
        (directory / "weights.json").write_text(json.dumps(state))
        if not weights_only:
            (directory / "optimizer.json").write_text("{}")

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        if not (directory / "weights.json").is_file():
            raise TrainerError(f"{directory} is no checkpoint")
        state = json.loads((directory / "weights.json").read_text())
        self.weights, self.weights_version = state["weights"], state["version"]

    async def close(self) -> None:
        return


async def open_scripted(spec: JobSpec) -> ScriptedEngine:
    fault = spec.directory / "fault"
    if fault.exists() and fault.read_text() == "open":
        raise ConfigError("the weights are of another architecture")
    if spec.body.comment == "never opens":
        await asyncio.sleep(3600)
    if spec.body.comment == "fails to open":
        raise ConfigError("the weights are of another architecture")
    if spec.body.comment == "dies while opening":
        sys.stderr.write("CUDA error: out of memory\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return ScriptedEngine(spec)


if __name__ == "__main__":
    asyncio.run(serve_engine(Path(sys.argv[1]), open_scripted))
