"""What a monitoring system scrapes from the service: its jobs, its GPUs, and the requests that it answered.

Jobs and GPUs are counted when they are asked for; over all owners, and without a name of any.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotage.service.jobs import Jobs
from pilotage.wire.jobs import HARDWARE

_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class JobCollector(Collector):
    """Counts jobs by status and GPUs by kind, at the moment of a scrape."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield what there is now."""
        jobs = GaugeMetricFamily("pilotage_service_jobs", "Jobs, ended ones included.", labels=["status"])
        for status, count in self._jobs.status_counts().items():
            jobs.add_metric([status], count)
        yield jobs
        gpus = GaugeMetricFamily(
            "pilotage_service_gpus", "GPUs of the service.", labels=["hardware", "state"]
        )
        for hardware in HARDWARE:
            capacity = self._jobs.capacity(hardware)
            if capacity.max_total_gpus:
                gpus.add_metric([hardware, "in_use"], capacity.in_use_gpus)
                gpus.add_metric([hardware, "pending"], capacity.pending_gpus)
                gpus.add_metric([hardware, "available"], capacity.available_gpus)
        yield gpus


class RequestMeter:
    """ASGI middleware that counts answers by status, and times them to their last byte."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._answers = Counter(
            "pilotage_service_requests", "Requests answered.", ["method", "status"], registry=registry
        )
        self._seconds = Histogram(
            "pilotage_service_request_seconds",
            "Time to the last byte; calls that wait for an engine are among them.",
            buckets=_BUCKETS_S,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and watch its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500  # of a request that ends without an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._answers.labels(method, str(status)).inc()
            self._seconds.observe(time.perf_counter() - started)


_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD"})
"""Others are the client's words, and would make a series each."""
