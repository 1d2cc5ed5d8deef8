"""One rollout in a line: what a list shows, and what it can be filtered by. Runs in worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from pilotage.errors import TemplateError
from pilotage.loops import read_rollout
from pilotage.ops.view.library import rollout_id
from pilotage.rendering import TemplateRenderer, load_renderer
from pilotage.types import Outcome, Reward, Rollout, Trajectory

_SNIPPET_CHARACTERS = 60
"""Shown on each side of a match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyText:
    """What turns a run's ids into text."""

    model: str
    """Directory of the tokenizer and the chat template."""
    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a list knows of one rollout; `fault` says why a file could not be read."""

    id: str
    folder: str
    task: str = ""
    group: str = ""
    attempt: int = 0
    outcome: str = ""
    reward: float | None = None
    reward_key: str = ""
    turns: int = 0
    branches: int = 0
    """Turns that started another branch."""
    tokens: int = 0
    """Context and sampled, each counted once."""
    sampled_tokens: int = 0
    tools: tuple[str, ...] = ()
    """Names of the tools that were called, sorted."""
    counters: dict[str, int]
    total_s: float | None = None
    started_at: float | None = None
    """Unix seconds of the first model call."""
    finished_at: float | None = None
    failure: str = ""
    fault: str = ""

    def skeleton(self) -> Rollout:
        """Return the rollout without its turns: all that its siblings' advantages depend on."""
        reward = None
        if self.reward is not None:
            reward = Reward(value=self.reward, key=self.reward_key, source="")
        return Rollout(
            id=self.id,
            group_id=self.group,
            task_id=self.task,
            attempt=self.attempt,
            outcome=Outcome(self.outcome),
            reward=reward,
            trajectory=Trajectory(),
        )


SUMMARIES = TypeAdapter(list[Summary])
"""Reads and writes what the cache keeps."""


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
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        fault = f"{type(error).__name__}: {error}"
        return Summary(id=rollout_id(path), folder=path.parent.name, counters={}, fault=fault)
    turns = rollout.trajectory.turns
    sampled = rollout.trajectory.sampled_tokens
    return Summary(
        id=rollout_id(path),
        folder=path.parent.name,
        task=rollout.task_id,
        group=rollout.group_id,
        attempt=rollout.attempt,
        outcome=rollout.outcome,
        reward=None if rollout.reward is None else rollout.reward.value,
        reward_key="" if rollout.reward is None else rollout.reward.key,
        turns=len(turns),
        branches=len(list(rollout.trajectory.branch_causes())),
        tokens=sampled + sum(turn.context_ids.size for turn in turns),
        sampled_tokens=sampled,
        tools=_tools(rollout, renderer),
        counters=dict(rollout.counters),
        total_s=rollout.timings_s.get("total"),
        started_at=min((turn.started_at for turn in turns), default=None),
        finished_at=max((turn.finished_at for turn in turns), default=None),
        failure="" if rollout.failure is None else rollout.failure.message,
    )


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
    except (OSError, EOFError, ValueError, KeyError, TypeError):
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
