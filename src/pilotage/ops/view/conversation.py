"""A rollout as a person reads it: messages of the context, parsed replies, and sampled tokens one by one.

Shows what the ids say; where a template writes something of its own (a header, a closing marker), the
conversation leaves it out and the tokens show it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pilotage.ops.transcripts import ContextMessage, read_messages
from pilotage.ops.view.drift import Drift, drift_of
from pilotage.ops.view.fates import RolloutFate, TurnFate
from pilotage.rendering import DecodedPiece, TemplateRenderer
from pilotage.types import Rollout, TokenIds, Turn

_LOGPROB_BOUNDS = np.array([0.01, 0.1, 0.5, 1.0, 2.0, 4.0])
"""Upper bounds in nats of -log-prob of the colours 0 to 5; 6 is beyond."""
_GAP_BOUNDS = np.array([1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0])
"""Upper bounds in nats of |trainer - sampler log-prob| of the colours 0 to 5; 6 is beyond."""
_ADVANTAGE_BOUNDS = np.array([0.1, 0.5, 1.0])
_MOST_JOINED_IDS = 8
"""Ids that may share one character; more than that are no UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One tool call of a reply."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    """Name and value of each; one without a name where the call is malformed."""
    is_malformed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One sampled token, or several that share a character."""

    text: str
    classes: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One sampler call."""

    index: int
    parent: int | None
    depth: int
    cause: str
    drift: Drift | None
    messages: tuple[ContextMessage, ...]
    context: tuple[DecodedPiece, ...]
    """The whole context, as it was read."""
    context_tokens: int
    reasoning: str
    content: str
    calls: tuple[CallView, ...]
    tokens: Iterator[TokenView]
    """Made while they are read, once: a conversation does without, which halves its time."""
    sampled_tokens: int
    trained_tokens: int
    fate: str
    """What became of the sampled tokens, in words."""
    fate_class: str
    finish_reason: str
    is_delivered: bool
    mean_logprob: float | None
    versions: tuple[int, ...]
    seconds: float
    started_at: float


def turn_views(rollout: Rollout, renderer: TemplateRenderer, fate: RolloutFate | None) -> list[TurnView]:
    """Return the turns of a rollout in order; linear in its tokens, but for the drifts."""
    depths: list[int] = []
    views: list[TurnView] = []
    for index, turn in enumerate(rollout.trajectory.turns):
        parent_depth = 0 if turn.parent is None else depths[turn.parent]
        depths.append(parent_depth + (turn.branch_cause is not None))
        turn_fate = None if fate is None else fate.turns[index]
        words, kind = _fate_words(turn_fate)
        context = tuple(renderer.read(turn.context_ids))
        reply = renderer.parse(turn.completion_ids, ())
        views.append(
            TurnView(
                index=index,
                parent=turn.parent,
                depth=depths[index],
                cause=turn.branch_cause or "",
                drift=drift_of(rollout.trajectory, index, renderer.decode),
                messages=tuple(read_messages(context)),
                context=context,
                context_tokens=turn.context_ids.size,
                reasoning=reply.message.reasoning,
                content=reply.message.content,
                calls=tuple(_call(call.name, call.arguments) for call in reply.message.tool_calls),
                tokens=_tokens(turn, renderer, turn_fate),
                sampled_tokens=turn.completion_ids.size,
                trained_tokens=0 if turn_fate is None else int(turn_fate.is_trained_K.sum()),
                fate=words,
                fate_class=kind,
                finish_reason=turn.finish_reason,
                is_delivered=turn.is_delivered,
                mean_logprob=float(turn.logprobs.mean()) if turn.logprobs.size else None,
                versions=tuple(np.unique(turn.weights_versions).tolist()),
                seconds=turn.finished_at - turn.started_at,
                started_at=turn.started_at,
            )
        )
    return views


def _call(name: str, arguments: str) -> CallView:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        return CallView(name=name, arguments=(("", arguments),), is_malformed=True)
    shown = tuple(
        (str(key), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in values.items()
    )
    return CallView(name=name, arguments=shown, is_malformed=False)


def _fate_words(fate: TurnFate | None) -> tuple[str, str]:
    if fate is None:
        return "", ""
    if fate.is_trained_K.size and fate.is_trained_K.all():
        return "trained", "trained"
    rest = f"{fate.kind}: {fate.reason}"
    trained = int(fate.is_trained_K.sum())
    return (f"{trained} trained, others {rest}", "trained") if trained else (rest, fate.kind)


def _tokens(turn: Turn, renderer: TemplateRenderer, fate: TurnFate | None) -> Iterator[TokenView]:
    """Yield the sampled tokens; each has its classes for every way of colouring."""
    colours = np.searchsorted(_LOGPROB_BOUNDS, -turn.logprobs, side="left").tolist()
    logprobs, versions = turn.logprobs.tolist(), turn.weights_versions.tolist()
    ids = turn.completion_ids.tolist()
    marks = _marks(fate, len(ids))
    gaps = None if fate is None or fate.gaps_K is None else fate.gaps_K.tolist()
    for text, start, end in _texts(turn.completion_ids, renderer):
        numbers = " ".join(f"#{number}" for number in ids[start:end])
        gap = f" gap {gaps[start]:+.2g}" if gaps is not None and marks[start].startswith("t") else ""
        yield TokenView(
            text=text,
            classes=f"l{colours[start]} {marks[start]}",
            title=f"{numbers} {logprobs[start]:.3g} v{versions[start]}{gap}",
        )


def _marks(fate: TurnFate | None, count: int) -> list[str]:
    if fate is None:
        return ["u"] * count
    sizes = np.searchsorted(_ADVANTAGE_BOUNDS, np.abs(fate.advantages_K)).tolist()
    trained, advantages = fate.is_trained_K.tolist(), fate.advantages_K.tolist()
    other = "m" if fate.kind == "masked" else "d"
    gaps = [""] * count
    if fate.gaps_K is not None:
        gaps = [f" g{size}" for size in np.searchsorted(_GAP_BOUNDS, np.abs(fate.gaps_K)).tolist()]
    return [
        f"t {'p' if advantage > 0 else 'n'}{size}{gap}"
        if is_trained and advantage
        else f"t{gap}"
        if is_trained
        else other
        for is_trained, advantage, size, gap in zip(trained, advantages, sizes, gaps, strict=True)
    ]


def _texts(ids: TokenIds, renderer: TemplateRenderer) -> Iterator[tuple[str, int, int]]:
    """Yield (text, start, end), joining ids that stand for parts of one character."""
    start = 0
    while start < ids.size:
        end = start + 1
        text = renderer.decode(ids[start:end])
        while "\ufffd" in text and end < min(ids.size, start + _MOST_JOINED_IDS):
            longer = renderer.decode(ids[start : end + 1])
            end += 1
            if "\ufffd" not in longer:
                text = longer
                break
        else:
            end = start + 1
        yield text, start, end
        start = end
