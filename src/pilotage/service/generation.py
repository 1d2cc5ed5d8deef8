"""The stock wire's generate and generate-stream: prompts in, completions out, with log-probs by token id.

There is one completion a prompt. Parameters that the engine cannot honour are refused; none is dropped.
"""

import asyncio
import reprlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotage.errors import SamplerError
from pilotage.rendering import TokenizerFile
from pilotage.rendering.tokenizer import Markup
from pilotage.service.engine_host import EngineHost
from pilotage.service.refusals import Refusal, error_body
from pilotage.types import Completion, SamplingParams, TokenIds
from pilotage.wire.core import ErrorCode

_MAX_PROMPTS = 16_384
_PARAMS = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop_token_ids",
    "logprobs",
    "prompt_logprobs",
}
_NO_EFFECT = {"n": 1, "stop": None, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
              "frequency_penalty": 0.0, "ignore_eos": False, "skip_special_tokens": None}  # fmt: skip
"""Parameters that are taken with this value only (None: also absent or empty)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One prompt with its parameters."""

    prompt_ids: TokenIds
    params: SamplingParams
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    routing_key: str


def read_wishes(tree: Any, host: EngineHost) -> list[Wish]:
    """Read the body of a generate call.

    Raises:
        Refusal: it holds something else, or something that cannot be honoured; the path says where.
    """
    if not isinstance(tree, dict) or "prompts" not in tree:
        raise Refusal(ErrorCode.INVALID, "a generate body is a dict with prompts", path="prompts")
    unknown = sorted(set(tree) - {"prompts", "sampling_params", "routing_key", "strict"})
    unknown = [key for key in unknown if not str(key).startswith("x-")]
    if unknown:
        raise Refusal(ErrorCode.INVALID, f"unknown key {unknown[0]}", path=str(unknown[0]))
    prompts = _prompts(tree["prompts"])
    params = _aligned(tree.get("sampling_params"), len(prompts), "sampling_params")
    keys = _aligned(tree.get("routing_key"), len(prompts), "routing_key")
    return [_wish(prompt, params[i], keys[i], host, path=f"{i}") for i, prompt in enumerate(prompts)]


async def generate(wishes: Sequence[Wish], host: EngineHost, on_result: Callable[[int, Any], None]) -> None:
    """Sample every wish; `on_result` gets each index with its result, or with the error it ended in."""

    async def one(index: int, wish: Wish) -> None:
        try:
            completion = await host.engine.sample(
                wish.prompt_ids, wish.params, session_id=wish.routing_key, turn_index=0
            )
        except SamplerError as error:
            on_result(index, error)
            return
        prompt_logprobs = None
        if wish.wants_prompt_logprobs:
            temperature = wish.params.temperature or 1.0
            prompt_logprobs = await host.prompt_logprobs(wish.prompt_ids, temperature=temperature)
        on_result(index, _result(completion, wish, host.tokenizer, prompt_logprobs))

    # A prompt that failed is a result; what is raised is the engine's own failure.
    await together([one(index, wish) for index, wish in enumerate(wishes)])


async def together[T](calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls at once and return their results in order; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def error_event(index: int, error: SamplerError) -> dict[str, Any]:
    """Return the stream event of a prompt that failed."""
    return {"type": "error", "index": index, "error": error_body(error).model_dump(mode="json")}


# --- bodies ---


def _prompts(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return [value]
    if not isinstance(value, list) or not value:
        raise Refusal(ErrorCode.INVALID, "prompts is a non-empty list", path="prompts")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [value]
    if len(value) > _MAX_PROMPTS:
        raise Refusal(ErrorCode.TOO_LARGE, f"at most {_MAX_PROMPTS} prompts a call", path="prompts")
    return value


def _aligned(value: Any, count: int, path: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise Refusal(ErrorCode.INVALID, f"{path} has {len(value)} entries for {count} prompts", path=path)
    return value


def _wish(prompt: Any, params: Any, key: Any, host: EngineHost, *, path: str) -> Wish:
    if key is not None and not isinstance(key, str):
        raise Refusal(ErrorCode.INVALID, "a routing_key is a string", path=f"routing_key.{path}")
    settings = {} if params is None else params
    if not isinstance(settings, Mapping):
        raise Refusal(ErrorCode.INVALID, "sampling_params are an object", path=f"sampling_params.{path}")
    return Wish(
        prompt_ids=_prompt_ids(prompt, host, path=f"prompts.{path}"),
        params=_sampling_params(settings, host, path=f"sampling_params.{path}"),
        wants_logprobs=_wants(settings, "logprobs", path),
        wants_prompt_logprobs=_wants(settings, "prompt_logprobs", path),
        routing_key=key or "",
    )


def _prompt_ids(prompt: Any, host: EngineHost, *, path: str) -> TokenIds:
    if isinstance(prompt, str):
        ids = host.tokenizer.encode([Markup(prompt)])
    else:
        try:
            array: NDArray[Any] = np.asarray(prompt)
        except (ValueError, OverflowError):
            array = np.zeros(0, np.float64)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
            raise Refusal(ErrorCode.INVALID, "a prompt is text or a list of token ids", path=path)
        if array.max() > np.iinfo(np.int32).max:
            raise Refusal(ErrorCode.INVALID, "a token id is out of range", path=path)
        ids = array.astype(np.int32)
    if not ids.size:
        raise Refusal(ErrorCode.INVALID, "the prompt is empty", path=path)
    return ids


def _sampling_params(settings: Mapping[str, Any], host: EngineHost, *, path: str) -> SamplingParams:
    for key, value in settings.items():
        if key in _PARAMS or str(key).startswith("x-"):
            continue
        if key not in _NO_EFFECT:
            raise Refusal(ErrorCode.INVALID, f"{key} cannot be honoured here", path=f"{path}.{key}")
        if isinstance(value, np.ndarray) or (
            value != _NO_EFFECT[key] and not (_NO_EFFECT[key] is None and value in ([], True, False, ""))
        ):
            raise Refusal(
                ErrorCode.INVALID,
                f"{key} = {reprlib.repr(value)} cannot be honoured here",
                path=f"{path}.{key}",
            )
    stops = settings.get("stop_token_ids")
    if stops is not None and not isinstance(stops, list | tuple):
        raise Refusal(ErrorCode.INVALID, "stop_token_ids is a list", path=f"{path}.stop_token_ids")
    if any(not isinstance(stop, int) or stop not in host.stop_token_ids for stop in stops or ()):
        raise Refusal(
            ErrorCode.INVALID,
            f"the engine stops at {list(host.stop_token_ids)}; other ids cannot be honoured",
            path=f"{path}.stop_token_ids",
        )
    try:
        top_k = int(_number(settings.get("top_k"), 0))
        return SamplingParams(
            temperature=_number(settings.get("temperature"), 1.0),
            top_p=_number(settings.get("top_p"), 1.0),
            top_k=0 if top_k == -1 else top_k,
            max_tokens=int(_number(settings.get("max_tokens"), 16)),
            seed=_seed(settings.get("seed")),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(ErrorCode.INVALID, str(error), path=path) from None


def _number(value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {reprlib.repr(value)}")
    return value


def _seed(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"a seed is a whole number from 0 on, got {reprlib.repr(value)}")
    return value


def _wants(settings: Mapping[str, Any], key: str, path: str) -> bool:
    value = settings.get(key)
    if value is None or value is False:
        return False
    if value is True or (isinstance(value, int | float) and value in (0, 1)):
        return True
    raise Refusal(
        ErrorCode.INVALID,
        f"{key} gives the log-prob of the token itself; the top {reprlib.repr(value)} cannot be had",
        path=f"sampling_params.{path}.{key}",
    )


# --- results ---


def _result(
    completion: Completion, wish: Wish, tokenizer: TokenizerFile, prompt_logprobs: NDArray[np.float32] | None
) -> dict[str, Any]:
    ids = completion.token_ids.tolist()
    result: dict[str, Any] = {
        "text": tokenizer.decode(ids),
        "token_ids": ids,
        "finish_reason": completion.finish_reason.value,
        "weights_versions": completion.weights_versions.tolist(),
    }
    if wish.wants_logprobs:
        result["logprobs"] = _by_id(ids, completion.logprobs.tolist())
    if prompt_logprobs is not None:
        result["prompt_logprobs"] = [None, *_by_id(wish.prompt_ids.tolist(), prompt_logprobs.tolist())[1:]]
    return result


def _by_id(ids: Sequence[int], logprobs: Sequence[float]) -> list[Any]:
    return [{str(i): {"logprob": value}} for i, value in zip(ids, logprobs, strict=True)]
