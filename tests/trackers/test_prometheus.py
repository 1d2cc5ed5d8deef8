"""What Prometheus gets from a driver: the newest record and the proxy's sums, over real HTTP."""

import socket
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.algorithms.strategies import make_rollout, make_turn

from pilotage.errors import ConfigError
from pilotage.proxy.measures import ProxyMeasures
from pilotage.trackers.prometheus import NewestRecord, serve_metrics


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def scraped(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    return {
        sample.name + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_newest_record_and_what_the_proxy_counted() -> None:
    registry, newest, proxy = CollectorRegistry(), NewestRecord("demo"), ProxyMeasures()
    registry.register(newest)
    registry.register(proxy)
    newest.write({"step": 1, "reward/mean": 0.5})
    newest.write({"step": 2, "reward/mean": 0.75, "ledger/masked_tokens/stuck": 12})
    turns = [
        replace(make_turn(None, [1], [2, 3]), started_at=10.0, finished_at=10.25),
        replace(make_turn(0, [4], [5]), started_at=11.0, finished_at=18.0),
    ]
    proxy.opened()
    proxy.opened()
    proxy.closed(make_rollout("a", *turns, reward=1.0).trajectory, {"requests": 2, "hack_network": 1}.items())
    port = free_port()
    with serve_metrics(registry, port):
        found = scraped(port)
    assert found["pilotage_run_step,demo"] == 2
    assert found["pilotage_run_reward_mean,demo"] == 0.75
    assert found["pilotage_run_ledger_masked_tokens_stuck,demo"] == 12
    assert (found["pilotage_proxy_sessions_open"], found["pilotage_proxy_sessions_closed_total"]) == (1, 1)
    assert found["pilotage_proxy_events_total,hack_network"] == 1
    assert found["pilotage_proxy_sampled_tokens_total"] == 3
    # 0.25 s and 7 s: one below half a second, both below ten.
    assert found["pilotage_proxy_turn_seconds_bucket,0.5"] == 1
    assert found["pilotage_proxy_turn_seconds_bucket,10.0"] == 2
    assert found["pilotage_proxy_turn_seconds_sum"] == 7.25


def test_a_port_that_is_taken_is_one_clear_line_and_a_port_that_was_used_is_free_again() -> None:
    port = free_port()
    with serve_metrics(CollectorRegistry(), port):
        second = serve_metrics(CollectorRegistry(), port)
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"), second:
            pass
    with serve_metrics(CollectorRegistry(), port):
        assert scraped(port) == {}
