"""The newest record of a run, as gauges that a monitoring system scrapes from the driver."""

import contextlib
import re
from collections.abc import Generator, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pilotage.errors import ConfigError

_HOST = "127.0.0.1"


class NewestRecord(Collector):
    """A `MetricSink` that keeps one record: `reward/mean` is the gauge `pilotage_run_reward_mean`."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._record: Mapping[str, float | int] = {}

    def write(self, record: Mapping[str, float | int]) -> None:
        """See `MetricSink`."""
        self._record = dict(record)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each key; two keys that become one name are both left to `metrics.jsonl`."""
        names = {key: "pilotage_run_" + re.sub(r"[^A-Za-z0-9_]", "_", key) for key in self._record}
        for key, name in names.items():
            if list(names.values()).count(name) == 1:
                gauge = GaugeMetricFamily(name, f"{key} of the newest step.", labels=["run"])
                gauge.add_metric([self._run], self._record[key])
                yield gauge


@contextlib.contextmanager
def serve_metrics(registry: CollectorRegistry, port: int) -> Generator[None]:
    """Answer scrapes on loopback while the context is open.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        server, thread = start_http_server(port, addr=_HOST, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics_port: cannot listen on {_HOST}:{port}: {error.strerror}; give another, or leave it out"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
