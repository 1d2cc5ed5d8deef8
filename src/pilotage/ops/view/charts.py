"""Geometry of the page's drawings: numbers in, positions in pixels out; templates write the SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotage.ops.report import Record

_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 10.0, 10.0, 22.0
_WINDOW_STEPS = 5
"""Steps that the smoothed line is a mean over; as in `pilotage report`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One value, where it is drawn."""

    x: float
    y: float
    title: str
    low: float | None = None
    """Ends of its interval, in pixels; None where it has none."""
    high: float | None = None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Values over steps."""

    title: str
    width: float
    height: float
    marks: list[Mark]
    line: str
    """Points of the smoothed line, or of the values where they are not smoothed."""
    held_out: list[Mark] = field(default_factory=list[Mark])
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    last: str
    """Newest value."""

    @property
    def left(self) -> float:
        """Left end of the grid."""
        return _LEFT

    @property
    def right(self) -> float:
        """Right end of the grid."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        """Where the steps are written."""
        return self.height - _BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From values to pixels on one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def series(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    """Return (step, value) of every record that has a finite value."""
    return [
        (int(record["step"]), float(record[key]))
        for record in records
        if key in record and math.isfinite(record[key])
    ]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values from below `low` to above `high`, about `count` of them."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / max(count, 1)
    power = 10 ** math.floor(math.log10(raw))
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [index * size for index in range(first, max(last, first + 1) + 1)]


def number(value: float | None) -> str:
    """Return a number short enough for a table: three digits that count."""
    if value is None:
        return ""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def chart(
    records: Sequence[Record], key: str, *, title: str, width: float, height: float, is_smoothed: bool = False
) -> Chart | None:
    """Draw one figure of a run; None where it was never measured."""
    values = [(step, value) for step, value in series(records, key) if step > 0]
    held_out = _held_out(records) if key == "reward/mean" else []
    if not values and not held_out:
        return None
    everything = [value for _, value in values] + [
        bound for _, low, _, high in held_out for bound in (low, high)
    ]
    y_values = nice_ticks(min(everything), max(everything), 4)
    steps = [step for step, _ in values] + [step for step, *_ in held_out]
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    x = _Scale(low=x_low, high=x_high, start=_LEFT, end=width - _RIGHT)
    y = _Scale(low=y_values[0], high=y_values[-1], start=height - _BOTTOM, end=_TOP)
    smooth = _trailing_means(values) if is_smoothed else values
    x_values = [value for value in nice_ticks(x_low, x_high, int(width / 90)) if x_low <= value <= x_high]
    return Chart(
        title=title,
        width=width,
        height=height,
        marks=[
            Mark(x=x(step), y=y(value), title=f"step {step}: {number(value)}", step=step)
            for step, value in values
        ],
        line=" ".join(f"{x(step)},{y(value)}" for step, value in smooth),
        held_out=[
            Mark(
                x=x(step),
                y=y(mean),
                low=y(low),
                high=y(high),
                step=step,
                title=f"held out after step {step}: {number(mean)} ({number(low)} to {number(high)})",
            )
            for step, low, mean, high in held_out
        ],
        x_ticks=[Tick(at=x(value), label=number(value)) for value in x_values if value == int(value)],
        y_ticks=[Tick(at=y(value), label=number(round(value, 10))) for value in y_values],
        last=number(values[-1][1]) if values else "",
    )


def _held_out(records: Sequence[Record]) -> list[tuple[int, float, float, float]]:
    """Return (step, low, mean, high) of each evaluation."""
    widths = {int(record["step"]): record.get("eval/reward_ci95", 0.0) for record in records}
    return [
        (step, mean - widths[step], mean, mean + widths[step])
        for step, mean in series(records, "eval/reward_mean")
    ]


def _trailing_means(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    means: list[tuple[int, float]] = []
    for index, (step, _) in enumerate(values):
        window = [value for _, value in values[max(0, index - _WINDOW_STEPS + 1) : index + 1]]
        means.append((step, sum(window) / len(window)))
    return means


def sparkline(values: Sequence[float], *, width: float = 120, height: float = 22) -> str:
    """Return the points of a line without axes; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    x = _Scale(low=0, high=len(values) - 1, start=1, end=width - 1)
    y = _Scale(low=low, high=high if high > low else low + 1, start=height - 2, end=2)
    return " ".join(f"{x(index)},{y(value)}" for index, value in enumerate(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time."""

    label: str
    kind: str
    start_s: float
    end_s: float
    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span, where it is drawn: per mille of the width."""

    span: Span
    left: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Spans below each other on one time axis."""

    bars: list[Bar]
    total_s: float


def waterfall(spans: Sequence[Span]) -> Waterfall | None:
    """Draw spans from the first start to the last end; None where there are none."""
    if not spans:
        return None
    start = min(span.start_s for span in spans)
    total = max(max(span.end_s for span in spans) - start, 1e-9)
    return Waterfall(
        bars=[
            Bar(
                span=span,
                left=round(1000 * (span.start_s - start) / total, 1),
                width=round(max(1000 * (span.end_s - span.start_s) / total, 2.0), 1),
            )
            for span in spans
        ],
        total_s=total,
    )
