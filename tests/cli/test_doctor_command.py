"""`pilotage doctor` as a person runs it: exit codes, output, and what it must not touch."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.service.rig import PREFIX, job_body, rig

from pilotage.cli.commands import run
from pilotage.ops.doctor.findings import FindingName
from pilotage.rollouts.register import default_directory

ROOT = Path(__file__).resolve().parents[2]


class ServiceThread(threading.Thread):
    """A real service on a socket, in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server: uvicorn.Server | None = None

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        async with rig(self.directory) as service:
            self.server = uvicorn.Server(uvicorn.Config(service.app, log_config=None, lifespan="off"))
            await self.server.serve(sockets=[self.listener])

    def stop(self) -> None:
        if self.server is not None:
            self.server.should_exit = True
        self.join(timeout=60)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing configured, and a register and tmux servers of this test's own."""
    for name in (*[n for n in os.environ if n.startswith(("ARCTIC_", "CORTEX_", "SNOWFLAKE_"))], "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SNOWFLAKE_HOME", "TMUX_TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.fixture
def service(alone: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[ServiceThread]:
    thread = ServiceThread(alone / "service")
    (alone / "service").mkdir()
    monkeypatch.setenv("ARCTIC_CORTEX_BASE_URL", thread.url)
    monkeypatch.setenv("ARCTIC_CORTEX_DATABASE", "db")
    monkeypatch.setenv("ARCTIC_CORTEX_SCHEMA", "public")
    thread.start()
    yield thread
    thread.stop()


def test_without_a_recipe_the_machine_is_looked_at_in_json(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--json", "--runs-dir", str(alone / "runs")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fixed"] == []
    assert report["took_s"] < 10
    names = [finding["name"] for finding in report["findings"]]
    assert names == [name for name in FindingName if name in names]
    assert {"python", "sandbox", "clock", "login"} <= set(names)
    assert set(report["findings"][0]) == {"name", "severity", "evidence", "fix"}


def test_a_recipe_that_is_not_there_is_a_usage_error(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(alone / "none.toml")]) == 2
    assert "give a recipe file" in capsys.readouterr().err


def test_a_recipe_that_needs_a_service_without_a_login_ends_with_1_and_says_what_to_do(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "recipes" / "demo.toml")
    missing = f'tasks.train=["{alone}/none"]'
    code = run(["doctor", recipe, "backend=cortex", missing, "--runs-dir", str(alone / "runs")])
    out = capsys.readouterr().out
    assert code == 1
    lines = out.splitlines()
    login = next(i for i, line in enumerate(lines) if line.split()[:2] == ["ERROR", "login"])
    assert "fix: run `pilotage login`" in lines[login + 1]
    tasks = next(i for i, line in enumerate(lines) if line.split()[:2] == ["ERROR", "tasks"])
    assert "fix: give a Harbor task" in lines[tasks + 1]
    assert any(line.split()[:2] == ["-", "sampler"] for line in lines)
    assert lines[-1].startswith("2 errors, ")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_fix_removes_what_is_ours_and_leaves_the_tmux_server_job_and_directory_of_others(
    service: ServiceThread, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, foreign = alone / "runs", alone / "runs" / "someone-else"
    (runs / "over").mkdir(parents=True)
    (runs / "over" / "config.toml").write_text("")
    (runs / "over" / "launcher.pid").write_text("1\n")
    foreign.mkdir()
    (foreign / "launcher.pid").write_text("1\n")
    register = default_directory()
    register.mkdir(mode=0o700)
    owner = {"pid": 2**22 - 1, "started_ticks": 1}
    tree = alone / "left"
    tree.mkdir()
    holding = {"id": "left", "owner": owner, "processes": [], "tree": str(tree), "is_marked": False}
    (register / "left.json").write_text(json.dumps(holding))
    tmux = ["tmux", "-L", f"someone-else-{uuid.uuid4().hex[:6]}"]
    url = f"{service.url}{PREFIX}"
    job = httpx.post(url, json={**job_body(), "comment": "team-b"}, timeout=30).json()["job_id"]
    subprocess.run([*tmux, "new-session", "-d", "sleep 120"], check=True)
    try:
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/{job}").json()["status"] != "running" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run(["doctor", "--fix", "--runs-dir", str(runs)]) == 0
        out = capsys.readouterr().out
        assert "fixed: swept 1 holdings: 0 processes, 1 directories" in out
        assert f"fixed: removed {runs / 'over' / 'launcher.pid'}" in out
        assert not tree.exists()
        assert (foreign / "launcher.pid").exists()
        assert subprocess.run([*tmux, "has-session"], check=False).returncode == 0
        assert httpx.get(f"{url}/{job}").json()["status"] == "running"
        assert "1 active: 0 mine" in out
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


@pytest.mark.agents
@pytest.mark.slow
def test_the_demo_is_well_from_its_template_to_its_oracle(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "demo", "--out", str(alone / "tasks"), "--train", "4", "--held-out", "2"]) == 0
    capsys.readouterr()
    tasks = [f'tasks.{part}=["{alone}/tasks/{part}"]' for part in ("train", "held_out")]
    recipe = str(ROOT / "recipes" / "demo.toml")
    code = run(["doctor", recipe, *tasks, "--json", "--runs-dir", str(alone / "runs")])
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report["findings"]}
    # Which runs others have on this machine is not this test's to say.
    assert [
        name for name, finding in found.items() if finding["fix"] and name != FindingName.LIVE_DRIVER
    ] == []
    assert code == 0
    of_a_service = {"login", "service", "token_expiry", "capacity", "jobs"}
    assert set(FindingName) - of_a_service <= found.keys()
    assert found["oracle"]["evidence"].endswith("the oracle earns 3")
    assert "processed: gap of" in found["processed_logprobs"]["evidence"]
