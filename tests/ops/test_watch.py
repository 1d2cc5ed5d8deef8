"""The watch over a run that is going on."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pilotage.loops import RunDirectory
from pilotage.ops.alarms import AlarmName
from pilotage.ops.watch import WEBHOOK_VARIABLE, AlarmWatch


class Webhook(BaseHTTPRequestHandler):
    told: list[dict[str, object]]

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    Webhook.told = []
    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/")
        yield Webhook.told
        server.shutdown()


def test_an_alarm_is_told_once_to_the_events_and_the_webhook_and_again_after_it_has_passed(
    tmp_path: Path, told: list[dict[str, object]]
) -> None:
    with RunDirectory.open(tmp_path / "run", {"name": "demo"}, resume=False) as run:
        watch = AlarmWatch(run)

        def write(first: int, mean: float) -> None:
            for step in range(first, first + 3):
                run.write({"step": step, "reward/mean": mean, "reward/count": 4, "reward/none_count": 0})

        rung: list[int] = []
        for first, mean in ((1, 0.0), (4, 0.5), (7, 0.0)):
            write(first, mean)
            rung += [sum(alarm.name == "rewards_zero" for alarm in watch.look()) for _ in range(2)]
        assert rung == [1, 0, 0, 0, 1, 0]
        steps = [event["step"] for event in run.events() if event.get("alarm") == "rewards_zero"]
    assert steps == [3, 9]
    assert [body["step"] for body in told if body["alarm"] == "rewards_zero"] == [3, 9]
    assert all(body["check"] for body in told)


def test_a_clock_that_is_set_rings_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory.open(tmp_path / "run", {"name": "demo"}, resume=False) as run:
        for step in range(1, 9):
            run.write({"step": step, "reward/mean": 0.5, "reward/count": 4, "time/step_s": 2.0})
        watch = AlarmWatch(run)
        assert AlarmName.STALLED not in {alarm.name for alarm in watch.look()}
        true_time = time.time
        monkeypatch.setattr(time, "time", lambda: true_time() + 86_400)
        assert AlarmName.STALLED not in {alarm.name for alarm in watch.look()}
