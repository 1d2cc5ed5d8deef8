"""What a monitoring system scrapes from the proxy: sessions, what they counted, the time of turns."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pilotage.types import Trajectory

_BUCKETS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMeasures(Collector):
    """Adds up sessions when they are closed; an open one is only counted."""

    def __init__(self) -> None:
        self._open = 0
        self._closed = 0
        self._events: Counter[str] = Counter()
        self._sampled_tokens = 0
        self._turns: Counter[float] = Counter()
        """By the upper bound of the bucket."""
        self._turn_seconds = 0.0

    def opened(self) -> None:
        """Count a session that begins."""
        self._open += 1

    def closed(self, trajectory: Trajectory, counters: Iterable[tuple[str, int]]) -> None:
        """Take over what a session recorded."""
        self._open -= 1
        self._closed += 1
        self._events.update(dict(counters))
        self._sampled_tokens += trajectory.sampled_tokens
        for turn in trajectory.turns:
            seconds = max(0.0, turn.finished_at - turn.started_at)
            bound = next((bound for bound in _BUCKETS_S if seconds <= bound), float("inf"))
            self._turns[bound] += 1
            self._turn_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield what there is now."""
        yield GaugeMetricFamily("pilotage_proxy_sessions_open", "Rollouts under way.", value=self._open)
        yield CounterMetricFamily("pilotage_proxy_sessions_closed", "Rollouts ended.", value=self._closed)
        events = CounterMetricFamily(
            "pilotage_proxy_events", "What sessions counted: requests, refusals, hacks.", labels=["event"]
        )
        for name, count in sorted(self._events.items()):
            events.add_metric([name], count)
        yield events
        yield CounterMetricFamily(
            "pilotage_proxy_sampled_tokens", "Tokens sampled for agents.", value=self._sampled_tokens
        )
        yield self._histogram()

    def _histogram(self) -> HistogramMetricFamily:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound in (*_BUCKETS_S, float("inf")):
            total += self._turns[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return HistogramMetricFamily(
            "pilotage_proxy_turn_seconds",
            "From a request to its recorded completion.",
            buckets=buckets,
            sum_value=self._turn_seconds,
        )
