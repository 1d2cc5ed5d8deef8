"""Choosing rollouts of a run: what a query may ask, and the rollouts that answer it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pilotage.errors import ConfigError
from pilotage.loops.summaries import Summary

PAGE_SIZE = 100
ORDERS = ("newest", "oldest", "reward", "-reward", "tokens", "-tokens", "seconds", "-seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a list of rollouts is narrowed to; empty is everything."""

    outcome: str = ""
    task: str = ""
    """Part of the task's id."""
    tool: str = ""
    folder: str = ""
    counter: str = ""
    """A counter that is not 0."""
    lowest: float | None = None
    """Bounds of the reward; where one is given, rollouts without a reward are out."""
    highest: float | None = None
    text: str = ""
    order: str = "newest"
    start: int = 0
    """Of the page, or of the files that a text search goes on with."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "Query":
        """Read a query; a word that is no number is an error in one line.

        Raises:
            ConfigError: a bound or a start is no number, or the order is unknown.
        """
        order = parameters.get("order") or "newest"
        if order not in ORDERS:
            raise ConfigError(f"order is one of {', '.join(ORDERS)}, got {order!r}")
        return cls(
            outcome=parameters.get("outcome", ""),
            task=parameters.get("task", "").strip(),
            tool=parameters.get("tool", ""),
            folder=parameters.get("folder", ""),
            counter=parameters.get("counter", ""),
            lowest=_number("lowest", parameters),
            highest=_number("highest", parameters),
            text=parameters.get("text", "").strip(),
            order=order,
            start=max(0, int(_number("start", parameters) or 0)),
        )

    def select(self, summaries: Sequence[Summary]) -> list[Summary]:
        """Return the rollouts that the query asks for, in its order; the text is not looked at."""
        found = [summary for summary in summaries if self._is_wanted(summary)]
        if self.order in ("newest", "oldest"):
            return found[::-1] if self.order == "newest" else found
        name = {"reward": "reward", "tokens": "tokens", "seconds": "total_s"}[self.order.lstrip("-")]
        known = [summary for summary in found if getattr(summary, name) is not None]
        unknown = [summary for summary in found if getattr(summary, name) is None]
        known.sort(key=lambda summary: getattr(summary, name), reverse=self.order.startswith("-"))
        return known + unknown

    def _is_wanted(self, summary: Summary) -> bool:
        return (
            (not self.outcome or summary.outcome == self.outcome)
            and self.task.lower() in summary.task.lower()
            and (not self.tool or self.tool in summary.tools)
            and (not self.folder or summary.folder == self.folder)
            and (not self.counter or bool(summary.counters.get(self.counter)))
            and self._is_in_bounds(summary.reward)
        )

    def _is_in_bounds(self, reward: float | None) -> bool:
        if self.lowest is None and self.highest is None:
            return True
        if reward is None:
            return False
        return (self.lowest is None or reward >= self.lowest) and (
            self.highest is None or reward <= self.highest
        )

    def parameters(self) -> dict[str, str]:
        """Return the query as it stands in an address, without the start."""
        values = {
            "outcome": self.outcome,
            "task": self.task,
            "tool": self.tool,
            "folder": self.folder,
            "counter": self.counter,
            "lowest": "" if self.lowest is None else f"{self.lowest:g}",
            "highest": "" if self.highest is None else f"{self.highest:g}",
            "text": self.text,
            "order": "" if self.order == "newest" else self.order,
        }
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the form of a list offers."""

    outcomes: list[str]
    tools: list[str]
    counters: list[str]


def choices(summaries: Sequence[Summary]) -> Choices:
    """Return what appears in the rollouts of a run."""
    return Choices(
        outcomes=sorted({summary.outcome for summary in summaries if summary.outcome}),
        tools=sorted({tool for summary in summaries for tool in summary.tools}),
        counters=sorted({name for summary in summaries for name, count in summary.counters.items() if count}),
    )


def _number(name: str, parameters: Mapping[str, str]) -> float | None:
    word = parameters.get(name, "").strip()
    if not word:
        return None
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise ConfigError(f"{name} is a number, got {word!r}")
    return value
