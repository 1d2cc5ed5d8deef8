"""Judge a sampler by what it answers, whatever is behind it: a dozen claims, from a few short samples.

One-token draws come from several contexts: a rendered prompt, cut inside its text, where any policy is unsure
of the next word. At each there are draws with several seeds, greedy, at two temperatures, and with a tiny
top_p.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from pilotage.errors import ContextExceededError, PilotageError
from pilotage.interfaces import Renderer, Sampler
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error, ok, skipped, warning
from pilotage.ops.doctor.need import SamplerNeed
from pilotage.rendering.scripted import SCENARIOS, TOOLS
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds

_NUM_SEEDS = 8
_CUTS = (0.4, 0.6, 0.8)
"""Where the prompt is cut, as shares of its length."""
_LOW, _HIGH = 0.7, 1.4
_TINY_TOP_P = 1e-6
_MOST_TOKENS = 64
"""Of the completions that are looked at for their end."""
_AGREEMENT = 0.9
"""Share of draws that must be the same token where only one is possible: two may tie in half precision."""
_UNSURE_LOGPROB = float(np.log(0.9))
"""Only of tokens below it can the temperature be seen."""
_SAME_LOGPROB = 0.02
"""Two log-probs that are nearer than this may be one, computed in two batches."""
_ROUNDING = 1e-3
_CLAIMS = (
    FindingName.SAMPLER,
    FindingName.SAMPLER_LOGPROBS,
    FindingName.PROCESSED_LOGPROBS,
    FindingName.TEMPERATURE,
    FindingName.TOP_P,
    FindingName.SEED,
    FindingName.END_TOKEN,
    FindingName.CONTEXT_WINDOW,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """One token."""

    context: int
    seed: int
    token: int
    logprob: float


async def check_sampler(sampler: Sampler, renderer: Renderer, need: SamplerNeed) -> list[Finding]:
    """Return one finding for each claim; after an error of the sampler itself, that alone."""
    prompt = renderer.render_prompt(SCENARIOS[0].opening, TOOLS)
    try:
        completions = await _completions(sampler, prompt, need)
        draws = await _Draws.draw(sampler, prompt)
    except (PilotageError, ValueError) as raised:
        return [from_error(FindingName.SAMPLER, raised, fix="read the log of the engine or of its job")]
    return [
        _answers(completions),
        _logprobs(completions, draws),
        _processed(draws, need),
        _temperature(draws),
        await _top_p(sampler, prompt),
        _seed(draws),
        _end_token(completions, renderer.stop_token_ids),
        await _context_window(sampler, prompt, need),
    ]


def skip_sampler(why: str) -> list[Finding]:
    """Return that none of the claims was looked at."""
    return [skipped(name, why) for name in _CLAIMS]


# --- asking ---


async def _completions(sampler: Sampler, prompt: TokenIds, need: SamplerNeed) -> list[tuple[int, Completion]]:
    """Return a few completions with the most tokens that each was allowed."""
    most = min(need.max_tokens, _MOST_TOKENS)
    params = SamplingParams(temperature=need.temperature, max_tokens=most)
    asked = [_sample(sampler, prompt, replace(params, seed=seed)) for seed in range(_NUM_SEEDS)]
    return [(most, completion) for completion in await asyncio.gather(*asked)]


async def _sample(sampler: Sampler, prompt: TokenIds, params: SamplingParams) -> Completion:
    return await sampler.sample(prompt, params, session_id=f"doctor-{params.seed}", turn_index=0)


async def _draw(sampler: Sampler, prompt: TokenIds, params: SamplingParams) -> list[_Draw]:
    """Draw one token from every context with every seed."""

    async def one(context: int, share: float, seed: int) -> _Draw:
        cut = prompt[: max(1, int(prompt.size * share))]
        completion = await _sample(sampler, cut, replace(params, max_tokens=1, seed=seed))
        if completion.token_ids.size != 1:
            raise ValueError(f"1 token was asked for, {completion.token_ids.size} came")
        return _Draw(
            context=context,
            seed=seed,
            token=int(completion.token_ids[0]),
            logprob=float(completion.logprobs[0]),
        )

    asked = [one(i, share, seed) for i, share in enumerate(_CUTS) for seed in range(_NUM_SEEDS)]
    return list(await asyncio.gather(*asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Draws of one token, each with the same contexts and seeds."""

    greedy: Sequence[_Draw]
    low: Sequence[_Draw]
    high: Sequence[_Draw]
    high_again: Sequence[_Draw]

    @classmethod
    async def draw(cls, sampler: Sampler, prompt: TokenIds) -> "_Draws":
        return cls(
            greedy=await _draw(sampler, prompt, SamplingParams(temperature=0.0)),
            low=await _draw(sampler, prompt, SamplingParams(temperature=_LOW)),
            high=await _draw(sampler, prompt, SamplingParams(temperature=_HIGH)),
            high_again=await _draw(sampler, prompt, SamplingParams(temperature=_HIGH)),
        )


def _agreement(draws: Sequence[_Draw]) -> float:
    """Return the share of draws that are the most frequent token of their context."""
    in_context = (list(group) for _, group in groupby(draws, attrgetter("context")))
    most = sum(Counter(draw.token for draw in group).most_common(1)[0][1] for group in in_context)
    return most / len(draws)


# --- judging ---


def _answers(completions: Sequence[tuple[int, Completion]]) -> Finding:
    sizes = [completion.token_ids.size for _, completion in completions]
    fix = "use another sampler: a turn's ids are what is trained"
    if any(not 1 <= completion.token_ids.size <= most for most, completion in completions):
        most = completions[0][0]
        return error(FindingName.SAMPLER, f"at most {most} tokens were asked for, {max(sizes)} came", fix=fix)
    if any((completion.token_ids < 0).any() for _, completion in completions):
        return error(FindingName.SAMPLER, "an id is negative", fix=fix)
    return ok(FindingName.SAMPLER, f"{len(sizes)} completions of {min(sizes)} to {max(sizes)} tokens")


def _logprobs(completions: Sequence[tuple[int, Completion]], draws: _Draws) -> Finding:
    found = np.concatenate([completion.logprobs for _, completion in completions])
    fix = "have the sampler return the log-prob of each id that it sampled; without it no ratio is true"
    name = FindingName.SAMPLER_LOGPROBS
    if not np.isfinite(found).all() or (found > _ROUNDING).any():
        return error(name, f"a log-prob is {found.max():g}, which is none", fix=fix)
    if all(draw.logprob == 0 for draw in draws.high) and _agreement(draws.high) < 1:
        return error(name, "every log-prob is 0, of tokens that differ", fix=fix)
    return ok(name, f"{found.size} log-probs, mean {found.mean():.3f}")


def _processed(draws: _Draws, need: SamplerNeed) -> Finding:
    name = FindingName.PROCESSED_LOGPROBS
    low = {(draw.context, draw.token): draw.logprob for draw in draws.low}
    pairs = [
        (low[draw.context, draw.token], draw.logprob)
        for draw in draws.high
        if (draw.context, draw.token) in low and draw.logprob < _UNSURE_LOGPROB
    ]
    if not pairs:
        return skipped(name, f"no token came up at both temperatures, {_LOW} and {_HIGH}")
    gap = max(abs(one - other) for one, other in pairs)
    evidence = f"gap of {gap:.3f} between temperatures {_LOW} and {_HIGH}, over {len(pairs)} tokens"
    if gap >= _SAME_LOGPROB:
        return ok(name, f"processed: {evidence}")
    if need.temperature == 1.0:
        return ok(name, f"raw, which is the same at the recipe's temperature of 1: {evidence}")
    return error(
        name,
        f"raw log-probs, not those of temperature {need.temperature:g}: {evidence}",
        fix="set loop.sampling.temperature=1.0, or have the sampler return processed log-probs"
        " (vLLM: logprobs_mode=processed_logprobs)",
    )


def _temperature(draws: _Draws) -> Finding:
    cold, hot = _agreement(draws.greedy), _agreement(draws.high)
    evidence = f"draws that agree: {cold:.0%} at temperature 0, {hot:.0%} at {_HIGH}"
    if cold < _AGREEMENT or hot >= cold:
        return error(
            FindingName.TEMPERATURE,
            f"it is not honoured: {evidence}",
            fix="use a sampler that takes the temperature of each request",
        )
    return ok(FindingName.TEMPERATURE, evidence)


async def _top_p(sampler: Sampler, prompt: TokenIds) -> Finding:
    name = FindingName.TOP_P
    try:
        found = await _draw(sampler, prompt, SamplingParams(temperature=_HIGH, top_p=_TINY_TOP_P))
    except (PilotageError, ValueError) as raised:
        return warning(name, f"refused: {raised}", fix="leave loop.sampling.top_p at 1.0 with this sampler")
    evidence = f"draws that agree: {_agreement(found):.0%} with top_p {_TINY_TOP_P:g} at {_HIGH}"
    if _agreement(found) < _AGREEMENT:
        return error(
            name,
            f"it is not honoured: {evidence}",
            fix="use a sampler that takes the top_p of each request, or leave loop.sampling.top_p at 1.0",
        )
    return ok(name, evidence)


def _seed(draws: _Draws) -> Finding:
    same = sum(one.token == other.token for one, other in zip(draws.high, draws.high_again, strict=True))
    evidence = f"{same} of {len(draws.high)} draws came again with their seed"
    if same < _AGREEMENT * len(draws.high):
        return warning(
            FindingName.SEED,
            f"it is not honoured: {evidence}",
            fix="expect that a rollout cannot be drawn again; training is not affected",
        )
    return ok(FindingName.SEED, evidence)


def _end_token(completions: Sequence[tuple[int, Completion]], stops: Sequence[int]) -> Finding:
    name = FindingName.END_TOKEN
    fix = "have the sampler keep the stop token in the ids, and stop at those of the template"
    ended = [c for _, c in completions if c.finish_reason is FinishReason.STOP]
    if _any(ended, lambda ids: ids[-1] not in stops):
        return error(name, f"a completion that stopped does not end with one of {list(stops)}", fix=fix)
    if _any((c for _, c in completions), lambda ids: bool(np.isin(ids[:-1], stops).any())):
        return error(name, f"sampling went on after one of {list(stops)}", fix=fix)
    cut = [c for _, c in completions if c.finish_reason is FinishReason.LENGTH]
    if _any(cut, lambda ids: ids[-1] in stops):
        return error(name, f"a completion that ends with one of {list(stops)} counts as cut", fix=fix)
    if not ended:
        return skipped(name, f"no completion ended within {completions[0][0]} tokens")
    return ok(name, f"the last id of {len(ended)} completions that stopped")


def _any(completions: Iterable[Completion], is_wrong: Callable[[TokenIds], bool]) -> bool:
    return any(is_wrong(completion.token_ids) for completion in completions if completion.token_ids.size)


async def _context_window(sampler: Sampler, prompt: TokenIds, need: SamplerNeed) -> Finding:
    name, window = FindingName.CONTEXT_WINDOW, sampler.max_context_tokens
    if window < need.max_context_tokens:
        return error(
            name,
            f"the sampler holds {window} tokens, the recipe wants {need.max_context_tokens}",
            fix=f"set policy.max_context_tokens={window}, or use a model with a longer window",
        )
    filling = np.resize(prompt, window)
    try:
        await _sample(sampler, filling, SamplingParams(max_tokens=1, seed=0))
    except ContextExceededError:
        return ok(name, f"{window} tokens; a prompt that fills them is refused")
    except (PilotageError, ValueError) as raised:
        return error(
            name,
            f"a prompt of {window} tokens is not refused as too long, but fails: {raised}",
            fix="see the engine's log; a full window must end a rollout, not fault it",
        )
    return error(
        name,
        f"a prompt of {window} tokens, the whole window, was answered: the sampler cut it",
        fix="switch off truncation of prompts in the sampler",
    )
