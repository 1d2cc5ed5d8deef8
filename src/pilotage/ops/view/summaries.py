"""Reading the rollouts themselves, in worker processes: summaries where a run wrote none, and text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pilotage.errors import RunDirectoryError, TemplateError
from pilotage.loops import read_rollout
from pilotage.loops.summaries import Summary, summarise
from pilotage.ops.view.library import rollout_id
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.types import Rollout

_SNIPPET_CHARACTERS = 60
"""Shown on each side of a match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyText:
    """What turns a run's ids into text."""

    model: str
    """Directory of the tokenizer and the chat template."""
    enable_thinking: bool | None = None


@lru_cache(maxsize=4)
def open_renderer(policy: PolicyText) -> TemplateRenderer | None:
    """Return the renderer that a run used, or None where its tokenizer is not on this machine."""
    try:
        return load_renderer(Path(policy.model), enable_thinking=policy.enable_thinking)
    except (TemplateError, OSError):
        return None


def summarise_files(paths: Sequence[Path], policy: PolicyText) -> list[Summary]:
    """Read each file; one that is torn or of another format is listed with its fault."""
    renderer = open_renderer(policy)
    return [_summarised(path, renderer) for path in paths]


def _summarised(path: Path, renderer: TemplateRenderer | None) -> Summary:
    try:
        rollout = read_rollout(path)
    except (OSError, RunDirectoryError) as error:
        fault = str(error)
        return Summary(id=rollout_id(path), folder=path.parent.name, counters={}, fault=fault)
    summary = summarise(path.parent.name, rollout)
    if all(turn.called_tools is not None for turn in rollout.trajectory.turns):
        return replace(summary, id=rollout_id(path))
    return replace(summary, id=rollout_id(path), tools=_tools(rollout, renderer))


def _tools(rollout: Rollout, renderer: TemplateRenderer | None) -> tuple[str, ...]:
    if renderer is None:
        return ()
    replies = (renderer.parse(turn.completion_ids, ()) for turn in rollout.trajectory.turns)
    return tuple(sorted({call.name for reply in replies for call in reply.message.tool_calls}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a text was found first in a rollout."""

    id: str
    folder: str
    turn: int
    before: str
    text: str
    after: str


def find_text(paths: Sequence[Path], policy: PolicyText, wanted: str) -> list[Match]:
    """Return the first place of `wanted` in each rollout that holds it, upper and lower case alike."""
    renderer = open_renderer(policy)
    if renderer is None:
        return []
    found = (_first_match(path, renderer, wanted) for path in paths)
    return [match for match in found if match is not None]


def _first_match(path: Path, renderer: TemplateRenderer, wanted: str) -> Match | None:
    try:
        turns = read_rollout(path).trajectory.turns
    except (OSError, RunDirectoryError):
        return None
    for index, turn in enumerate(turns):
        text = renderer.decode(turn.context_ids) + renderer.decode(turn.completion_ids)
        at = text.lower().find(wanted.lower())
        if at >= 0:
            end = at + len(wanted)
            return Match(
                id=rollout_id(path),
                folder=path.parent.name,
                turn=index,
                before=text[max(0, at - _SNIPPET_CHARACTERS) : at],
                text=text[at:end],
                after=text[end : end + _SNIPPET_CHARACTERS],
            )
    return None
