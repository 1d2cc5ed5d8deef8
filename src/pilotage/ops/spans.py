"""A run as OpenTelemetry spans: step -> its phases -> rollouts -> their phases and turns.

Spans are made of what has been measured when it is over, so nothing is added to a rollout.
"""

import time

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from pilotage.loops import Observer
from pilotage.types import Rollout

_NS = 1_000_000_000


class SpanObserver:
    """Tells another observer everything, and makes spans of it."""

    def __init__(self, observer: Observer, tracer: Tracer, *, run: str) -> None:
        self._observer = observer
        self._tracer = tracer
        self._run = run
        self._step: Span | None = None
        self._phase: Span | None = None

    def on_phase(self, phase: str, step: int, total: int) -> None:
        """Begin a phase, and its step where it is the first."""
        self._observer.on_phase(phase, step, total)
        if self._step is None:
            attributes = {"pilotage.run": self._run, "pilotage.step": step}
            self._step = self._tracer.start_span("step", Context(), attributes=attributes)
        if self._phase is not None:
            self._phase.end()
        self._phase = self._tracer.start_span(phase, set_span_in_context(self._step))

    def on_rollout(self, rollout: Rollout) -> None:
        """Add a rollout that has just ended to the phase."""
        self._observer.on_rollout(rollout)
        if self._phase is None:
            return
        end = time.time_ns()
        start = end - round(rollout.timings_s.get("total", 0.0) * _NS)
        attributes = {
            "pilotage.rollout": rollout.id,
            "pilotage.task": rollout.task_id,
            "pilotage.outcome": str(rollout.outcome),
        }
        if rollout.reward is not None:
            attributes["pilotage.reward"] = str(rollout.reward.value)
        span = self._tracer.start_span(
            "rollout", set_span_in_context(self._phase), attributes=attributes, start_time=start
        )
        self._add_parts(rollout, set_span_in_context(span), start)
        span.end(end)

    def _add_parts(self, rollout: Rollout, inside: Context, start: int) -> None:
        """Add phases, end to end as they were, and turns at their own times."""
        for name, seconds in rollout.timings_s.items():
            if name != "total":
                part = self._tracer.start_span(name, inside, start_time=start)
                start += round(seconds * _NS)
                part.end(start)
        for index, turn in enumerate(rollout.trajectory.turns):
            attributes = {
                "pilotage.turn": index,
                "gen_ai.usage.output_tokens": turn.completion_ids.size,
                "gen_ai.response.finish_reasons": [str(turn.finish_reason)],
            }
            call = self._tracer.start_span(
                "turn", inside, attributes=attributes, start_time=round(turn.started_at * _NS)
            )
            call.end(round(turn.finished_at * _NS))

    def on_record(self, record: dict[str, float]) -> None:
        """End the step, with its record as attributes."""
        self._observer.on_record(record)
        if self._step is not None:
            self._step.set_attributes({f"pilotage.{key}": value for key, value in record.items()})
        self.close()

    def close(self) -> None:
        """End what is open: a step that a stop has cut short has no record."""
        for span in (self._phase, self._step):
            if span is not None:
                span.end()
        self._phase = self._step = None
