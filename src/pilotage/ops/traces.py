"""Sends a run's spans to an OpenTelemetry collector, where OTEL_EXPORTER_OTLP_ENDPOINT names one.

An exporter that fails loses spans, never the run.
"""

import contextlib
import os
from collections.abc import Generator

from pilotage.errors import ConfigError
from pilotage.loops import Observer

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextlib.contextmanager
def traced(observer: Observer, *, run: str) -> Generator[Observer]:
    """Send spans of what `observer` is told to the endpoint of the environment, where there is one.

    Raises:
        ConfigError: there is one, and the extra `traces` is not installed.
    """
    if not os.environ.get(ENDPOINT_VARIABLE, "").strip():
        yield observer
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from pilotage.ops.spans import SpanObserver
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{ENDPOINT_VARIABLE} is set, and {error.name} is not installed; `pip install 'pilotage[traces]'`"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "pilotage"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    spans = SpanObserver(observer, provider.get_tracer("pilotage"), run=run)
    try:
        yield spans
    finally:
        spans.close()
        provider.shutdown()
