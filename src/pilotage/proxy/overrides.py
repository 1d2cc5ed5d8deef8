"""Sampling options that an agent asks for, against what the recipe decided.

The recipe owns every one of them: a temperature of 0 has no ratio, a fixed seed makes siblings equal, a
nucleus renormalises the log-probs. What differs is counted and logged, never obeyed. Names are those of chat
completions; other dialects translate their own.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pilotage.proxy.fields import JsonObject
from pilotage.types import SamplingParams

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stop": ([], ""),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "chat_template_kwargs": ({},),
    "ignore_eos": (False,),
    "thinking": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "context_management": (),
    "output_config": ({},),
}
"""Options without a counterpart in the recipe -> values that ask for nothing."""

_OWNED: dict[str, Callable[[SamplingParams], tuple[Any, ...]]] = {
    "temperature": lambda own: (own.temperature,),
    "top_p": lambda own: (own.top_p,),
    "top_k": lambda own: (own.top_k, -1) if own.top_k == 0 else (own.top_k,),
    "seed": lambda own: (own.seed,),
    "max_tokens": lambda own: (own.max_tokens,),
    "max_completion_tokens": lambda own: (own.max_tokens,),
}
"""Options that the recipe sets -> spellings of the recipe's own value."""


def overridden(options: JsonObject, own: SamplingParams) -> Iterator[str]:
    """Yield the name of every option in `options` that asks for something else than `own`."""
    for name, spellings in _OWNED.items():
        if _asks(options, name, spellings(own)):
            yield name
    for name, neutral in _NEUTRAL.items():
        if _asks(options, name, neutral):
            yield name


def _asks(options: JsonObject, name: str, nothing_new: tuple[object, ...]) -> bool:
    value = options.get(name)
    return value is not None and value not in nothing_new
