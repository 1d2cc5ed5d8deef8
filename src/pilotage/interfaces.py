"""The seams: Protocols through which the workers meet. A concrete class is chosen in a recipe, a CLI
command or a test, nowhere else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pilotage.types import (
    AdamParams,
    Completion,
    Denominators,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Message,
    ParsedReply,
    Rollout,
    RolloutRequest,
    Sample,
    SamplingParams,
    SessionAccess,
    SessionRecord,
    SessionSpec,
    StepResult,
    TokenIds,
    ToolSchema,
)


class Sampler(Protocol):
    """Ids in, ids out. Knows nothing of text."""

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: [n] the exact context.
            params: `params.seed` with `turn_index` seeds the draw, whatever else is in the batch.
            session_id: stable per rollout, for replica and cache affinity; never changes the result.

        Returns:
            At least one token, at most `params.max_tokens`; a stop token that was sampled is the last id.

        Raises:
            ContextExceededError: no room for one token after the prompt.
            WeightsChangingError: weights are being published.
            SamplerError: anything else. Cancelling the call frees its slot.
        """
        ...


class Trainer(Protocol):
    """Trains, publishes and keeps weights. Gradients accumulate over forward_backward until step."""

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """Add the gradient of `loss` over `samples`.

        Args:
            samples: whole rollouts.
            denominators: None where `samples` is one whole batch; else the counts of the larger batch that
                the caller has split, so that the pieces add up to it.

        Raises:
            TrainerError: it failed; no part of the gradient is ever applied.
        """
        ...

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """Return the log-probs that the current weights give to the tokens under the loss mask.

        Args:
            temperature: the logits are divided by it before the softmax.

        Returns:
            For each sample [L], 0 where the loss mask is not set. Accumulated gradients stay as they are.
        """
        ...

    async def step(self, params: AdamParams) -> StepResult:
        """Apply the accumulated gradient and clear it.

        Raises:
            TrainerError: nothing was accumulated, or the gradient is not finite (nothing is applied).
        """
        ...

    async def discard(self) -> None:
        """Drop the accumulated gradient, if there is one."""
        ...

    async def publish(self) -> int:
        """Make the sampler use the current weights; returns the new weights_version."""
        ...

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """Write weights (Hugging Face layout, safetensors) and optimizer into a new directory.

        Args:
            weights_only: leave the optimizer out; such a checkpoint samples, and starts a fresh optimizer.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Restore what `save` wrote, weights_version included; the sampler follows at `publish`."""
        ...


class Engine(Sampler, Trainer, Protocol):
    """A trainer and its sampler, held together: what a job of the training service runs."""

    @property
    def weights_version(self) -> int:
        """Version of the weights that the sampler uses."""
        ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a completion."""
        ...

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Trainer`.

        Args:
            weights_only: start a fresh optimizer, also where the checkpoint has one.
        """
        ...

    async def close(self) -> None:
        """Free everything it holds; calls that wait fail."""
        ...


class Renderer(Protocol):
    """Messages <-> tokens for one chat template. Pure: the same input gives the same ids."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Encode a whole conversation and the generation prompt.

        Only the template's own markers become special tokens; text that looks like one does not.
        """
        ...

    def render_suffix(
        self, last_id: int | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> TokenIds:
        """Encode what follows a recorded sequence that ended with a sampled turn.

        Args:
            last_id: last recorded id; where it is no stop token (the turn was cut), the suffix first
                closes the turn.
            messages: the new messages only (tool results, user messages; assistant messages that were
                not sampled here are encoded as context), then comes the generation prompt.
            tools: the offered tools, as in `render_prompt`.
        """
        ...

    def parse(self, completion_ids: TokenIds, tools: Sequence[ToolSchema]) -> ParsedReply:
        """Read content, reasoning and calls out of sampled ids. Never raises on what a policy wrote."""
        ...


class SessionHost(Protocol):
    """Opens and closes a rollout's session at the proxy."""

    def open(self, spec: SessionSpec) -> SessionAccess:
        """Make a session and its key."""
        ...

    def prolong(self, access: SessionAccess, seconds: float) -> None:
        """Let the key of an open session live longer by so much."""
        ...

    async def close(self, access: SessionAccess) -> SessionRecord:
        """End the session: cancels what is running, forgets the key, returns what was recorded."""
        ...


class RolloutRunner(Protocol):
    """Runs one attempt at one task."""

    async def run(self, request: RolloutRequest) -> Rollout:
        """Return exactly one finished rollout; raises only when cancelled."""
        ...


class MetricSink(Protocol):
    """Takes one record per step."""

    def write(self, record: Mapping[str, float | int]) -> None:
        """Store the record durably."""
        ...
