"""A run's spans: they nest as the run does, last as long as was measured, and end with the run."""

from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from tests.algorithms.strategies import make_rollout, make_turn

from pilotage.types import Rollout

pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pilotage.ops.spans import SpanObserver
from pilotage.ops.traces import traced


class Silent:
    """Watches and says nothing."""

    def on_phase(self, phase: str, step: int, total: int) -> None:
        pass

    def on_rollout(self, rollout: Rollout) -> None:
        pass

    def on_record(self, record: dict[str, float]) -> None:
        pass


def observed() -> tuple[SpanObserver, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SpanObserver(Silent(), provider.get_tracer("test"), run="demo"), exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_spans_nest_as_the_run_does_and_last_as_long_as_was_measured() -> None:
    observer, exporter = observed()
    turn = replace(make_turn(None, [1], [2, 3]), started_at=100.0, finished_at=101.5)
    rollout = make_rollout("step-0001-00-00", turn, reward=0.5)
    observer.on_phase("rollouts", 1, 1)
    observer.on_rollout(replace(rollout, timings_s={"environment": 1.0, "agent": 2.0, "total": 4.0}))
    observer.on_phase("train", 1, 0)
    observer.on_record({"step": 1, "reward/mean": 0.5})

    (step,), (phase,), (train,) = (named(exporter, name) for name in ("step", "rollouts", "train"))
    (attempt,), (agent,), (call,) = (named(exporter, name) for name in ("rollout", "agent", "turn"))
    parents = [(phase, step), (train, step), (attempt, phase), (agent, attempt), (call, attempt)]
    for child, parent in parents:
        assert child.parent is not None
        assert parent.context is not None
        assert child.parent.span_id == parent.context.span_id
    assert step.parent is None
    assert (seconds(attempt), seconds(agent), seconds(call)) == pytest.approx((4.0, 2.0, 1.5))
    assert (step.attributes or {})["pilotage.reward/mean"] == 0.5
    assert (call.attributes or {})["gen_ai.usage.output_tokens"] == 2


def test_a_step_that_is_cut_short_is_ended_and_the_next_begins_anew() -> None:
    observer, exporter = observed()
    observer.on_phase("rollouts", 3, 4)
    observer.close()
    observer.on_phase("rollouts", 3, 4)
    observer.on_record({"step": 3})
    assert len(named(exporter, "step")) == len(named(exporter, "rollouts")) == 2


def test_without_an_endpoint_the_observer_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    silent = Silent()
    with traced(silent, run="demo") as observer:
        assert observer is silent


def test_spans_reach_the_collector_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its OTLP exporter is not installed")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    try:
        with traced(Silent(), run="demo") as observer:
            observer.on_phase("rollouts", 1, 1)
            observer.on_record({"step": 1})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert {path for path, _ in received} == {"/v1/traces"}
    assert b"pilotage.run" in b"".join(body for _, body in received)
