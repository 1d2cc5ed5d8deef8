"""A `Sampler` on SkyRL's inference engines: ids in, ids and log-probs out."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pilotage.errors import ContextExceededError, PilotageError, SamplerError
from pilotage.integrations.skyrl.interface import EngineInput, EngineOutput, InferenceClient
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds

_FINISH_REASONS: Mapping[str, FinishReason] = MappingProxyType(
    {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
)


class SkyRLSampler:
    """Implements `Sampler` on the client that SkyRL hands to a generator.

    Log-probs are those of the sampling temperature where vLLM is started with `processed_logprobs`, which
    `SkyRLGenerator` demands. A completion bears the version under which it began: weights that arrive
    meanwhile are newer than it says, never older. The version is also the salt of vLLM's prefix cache, so no
    completion begins on keys and values of other weights.

    Args:
        client: SkyRL's `RemoteInferenceClient`.
        max_context_tokens: no more than the engines' `max_model_len`.
        stop_token_ids: ids that end a turn, as the renderer knows them.
        model: what the engines call the policy (SkyRL's `resolve_policy_model_name`); None is their base
            model.
    """

    def __init__(
        self,
        client: InferenceClient,
        *,
        max_context_tokens: int,
        stop_token_ids: Sequence[int],
        model: str | None = None,
    ) -> None:
        self._client = client
        self._max_context_tokens = max_context_tokens
        self._stop_token_ids = tuple(stop_token_ids)
        self._model = model

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._max_context_tokens

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. The session is also SkyRL's, whose router keeps it on one engine."""
        room = self._max_context_tokens - prompt_ids.size
        if room < 1:
            raise ContextExceededError(
                f"the prompt has {prompt_ids.size} tokens and the context window {self._max_context_tokens};"
                " a completion needs room for one more"
            )
        version = self._client.weight_version
        request = EngineInput(
            prompts=None,
            prompt_token_ids=[prompt_ids.tolist()],
            sampling_params=self._sampling_params(params, room, turn_index),
            session_ids=[session_id],
            mm_features=None,
            cache_salt=f"weights-{version}",
        )
        try:
            return _completion(await self._client.generate(request, model=self._model), version)
        except PilotageError:
            raise
        except Exception as error:  # SkyRL's and aiohttp's errors share no class; here they get their name
            raise SamplerError(f"SkyRL's engines failed: {type(error).__name__}: {error}") from error

    def _sampling_params(self, params: SamplingParams, room: int, turn_index: int) -> dict[str, object]:
        wanted: dict[str, object] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,  # vLLM's "off"
            "max_tokens": min(params.max_tokens, room),
            "min_tokens": 1,
            "logprobs": 1,
            "stop_token_ids": list(self._stop_token_ids),
            "skip_special_tokens": False,
        }
        seed = params.turn_seed(turn_index, bits=63)  # vLLM's are signed 64-bit integers
        if seed is not None:
            wanted["seed"] = seed
        return wanted


def _completion(answer: EngineOutput, version: int) -> Completion:
    [ids] = answer["response_ids"]
    [reason] = answer["stop_reasons"]
    logprobs = (answer["response_logprobs"] or [None])[0]
    if reason not in _FINISH_REASONS or not ids:
        raise SamplerError(
            f"SkyRL's engines ended a request after {len(ids)} tokens with {reason!r}; it may be repeated"
        )
    if logprobs is None or len(logprobs) != len(ids):
        count = "no" if logprobs is None else str(len(logprobs))
        raise SamplerError(
            f"SkyRL's engines returned {count} log-probs for {len(ids)} tokens; the turn cannot be trained"
        )
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        weights_versions=np.full(len(ids), version, np.int32),
        finish_reason=_FINISH_REASONS[reason],
    )
