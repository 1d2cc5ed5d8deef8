"""Runs that outlive their terminal: launched, refused, stopped, killed in every part, resumed, left alone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.rollouts.rig import write_task

from pilotage.loops import RunDirectory
from pilotage.ops.launch import LaunchSpec, systemd_command
from pilotage.pid_lock import holder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
COIN = "#!/bin/bash\necho $((RANDOM % 2)) > /logs/verifier/reward.txt\n"
RECIPE = """
name = "coin"
[policy]
model = "{model}"
max_context_tokens = 256
[tasks]
train = ["tasks"]
[rollouts]
agent = "tests.rollouts.sdk_agents:OneCall"
concurrency = 4
workers = 0
[loop]
num_steps = 400
tasks_per_step = 1
group_size = 4
checkpoint_every_steps = 50
max_idle_steps = 100
sampling.max_tokens = 4
"""


@dataclass(slots=True)
class Host:
    """A machine of one's own: its registers and terminals are under a directory of the test's."""

    root: Path
    environment: dict[str, str]

    def pilotage(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pilotage", *words],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def tmux(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["tmux", *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)

    def run(self, name: str = "coin") -> RunDirectory:
        return RunDirectory(self.root / "runs" / name)

    def status(self, name: str = "coin") -> dict[str, object]:
        return json.loads(self.pilotage("status", f"runs/{name}", "--json").stdout)[0]

    def log(self, name: str = "coin") -> str:
        return (self.root / "runs" / name / "log" / "driver.log").read_text()

    def leftovers(self) -> list[str]:
        """Processes that carry the test's directory, and what the registers hold."""
        processes: list[str] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = str(self.root).encode() in (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marked and int(entry.name) != os.getpid():
                processes.append(command)
        held = [path.name for path in (self.root / "runtime" / "pilotage").glob("*.json")]
        return processes + held


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    for name in ("runtime", "terminals"):
        (tmp_path / name).mkdir(mode=0o700)
    write_task(tmp_path / "tasks", test_sh=COIN)
    recipe = RECIPE.format(model=ROOT / "recipes" / "demo" / "policy")
    (tmp_path / "recipe.toml").write_text(recipe)
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "TMUX_TMPDIR": str(tmp_path / "terminals"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TMUX": "somebody's",
    }
    found = Host(tmp_path, environment)
    yield found
    for name in ("coin", "other"):
        if (tmp_path / "runs" / name).is_dir():
            found.pilotage("stop", f"runs/{name}")


def until(is_so: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def launched(host: Host) -> RunDirectory:
    """Launch the run and wait until it has trained a few steps."""
    done = host.pilotage("launch", "recipe.toml")
    assert done.returncode == 0, done.stderr
    run = host.run()
    until(lambda: len(run.metrics()) > 3)
    return run


def last_event(run: RunDirectory) -> str:
    return [event["event"] for event in run.events() if event["event"] != "alarm"][-1]


def until_down(run: RunDirectory) -> None:
    until(lambda: holder(run.launcher_path) is None and holder(run.lock_path) is None)


def test_a_launched_run_is_the_only_one_and_stops_with_nothing_lost_or_left(host: Host) -> None:
    run = launched(host)
    assert host.tmux("-L", "coin", "has-session").returncode == 0
    assert host.status()["state"] == "running"

    refused = host.pilotage("launch", "recipe.toml", "--run-name", "other")
    assert refused.returncode == 2
    assert f"{run.path} is launched on this host already, by process {holder(run.launcher_path)}" in (
        refused.stderr
    )
    assert not host.run("other").path.exists()
    assert "runs already" in host.pilotage("resume", "runs/coin").stderr

    stopped = host.pilotage("stop", "runs/coin")
    assert stopped.returncode == 0, stopped.stderr
    last = int(run.metrics()[-1]["step"])
    assert f"saved after step {last}" in stopped.stdout
    assert run.newest_checkpoint() == last
    assert host.status()["state"] == "stopped"
    assert host.leftovers() == []
    assert host.tmux("-L", "coin", "has-session").returncode != 0
    again = host.pilotage("stop", "runs/coin")
    assert (again.returncode, "does not run" in again.stdout) == (0, True)

    resumed = host.pilotage("resume", "runs/coin")
    assert resumed.returncode == 0, resumed.stderr
    until(lambda: run.metrics()[-1]["step"] > last)
    steps = [record["step"] for record in run.metrics()]
    assert steps == sorted(set(steps)), "no step is there twice"

    driver = holder(run.lock_path)
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    until(lambda: holder(run.lock_path) not in (None, driver))
    assert "crashed with exit code -9" in host.log()
    assert "driver_crashed" in [event["event"] for event in run.events()]

    host.tmux("-L", "coin", "send-keys", "-t", "run", "C-c")
    until_down(run)
    assert "the driver ended with exit code 130" in host.log()
    until(lambda: host.leftovers() == [])


def test_when_launcher_or_terminal_are_killed_the_driver_stops_cleanly(host: Host) -> None:
    run = launched(host)
    launcher = holder(run.launcher_path)
    assert launcher is not None
    os.kill(launcher, signal.SIGKILL)
    until_stopped(run)

    first = int(run.metrics()[-1]["step"])
    assert host.pilotage("resume", "runs/coin").returncode == 0
    until(lambda: run.metrics()[-1]["step"] > first)
    os.kill(int(host.tmux("-L", "coin", "display-message", "-p", "#{pid}").stdout), signal.SIGKILL)
    until_stopped(run)
    until(lambda: host.leftovers() == [])


def test_a_launched_runs_service_may_be_killed_and_its_job_ends_with_the_run(host: Host) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = (host.root / "recipe.toml").read_text()
    (host.root / "recipe.toml").write_text(recipe.replace("[policy]", 'backend = "cortex"\n[policy]'))
    host.environment["ARCTIC_CORTEX_BASE_URL"] = f"http://127.0.0.1:{port}"
    service = serve_policies(host, port)
    try:
        run = launched(host)
        service.kill()
        service.wait()
        service = serve_policies(host, port)
        last = run.metrics()[-1]["step"]
        until(lambda: run.metrics()[-1]["step"] > last + 2)
        assert "driver_crashed" not in [event["event"] for event in run.events()]

        stopped = host.pilotage("stop", "runs/coin")
        assert stopped.returncode == 0, stopped.stderr
        jobs = host.pilotage("jobs", "list", "--json").stdout
        assert [job["status"] for job in json.loads(jobs)["jobs"]] == ["cancelled"]
    finally:
        service.terminate()
        service.wait()
    until(lambda: host.leftovers() == [])


def serve_policies(host: Host, port: int) -> "subprocess.Popen[str]":
    """Start a service and wait until it serves."""
    command = [
        sys.executable,
        "-m",
        "pilotage",
        "serve",
        "--no-auth",
        "--models",
        str(ROOT / "recipes" / "demo"),
    ]
    service = subprocess.Popen(
        [*command, "--data", "service", "--port", str(port)],
        cwd=host.root,
        env=host.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    assert "serving on" in service.stdout.readline()
    return service


def until_stopped(run: RunDirectory) -> None:
    until_down(run)
    assert last_event(run) == "stopped"
    assert run.newest_checkpoint() == run.metrics()[-1]["step"]


def test_a_strangers_terminal_of_the_same_name_is_refused_and_left_alone(host: Host) -> None:
    host.tmux("-L", "coin", "-f", "/dev/null", "new-session", "-d", "-s", "mine", "sleep 300")
    try:
        refused = host.pilotage("launch", "recipe.toml")
        assert refused.returncode == 2
        assert "there is a tmux server -L coin already" in refused.stderr
        assert host.tmux("-L", "coin", "has-session", "-t", "mine").returncode == 0
        assert not host.run().path.exists()
    finally:
        host.tmux("-L", "coin", "kill-server")


def test_a_run_that_cannot_start_says_why_and_is_not_started_again(host: Host) -> None:
    wrong = host.pilotage("launch", "recipe.toml", "policy.model=nowhere")
    assert wrong.returncode == 2
    assert "nowhere" in wrong.stderr
    assert not host.run().path.exists()


def test_a_systemd_unit_gets_names_of_variables_and_never_their_values(tmp_path: Path) -> None:
    spec = LaunchSpec(run=tmp_path / "coin", command=("train", "recipe.toml"), restarts=3)
    command = systemd_command(spec, {"ARCTIC_CORTEX_PAT": "secret-value", "BASH_FUNC_x%%": "() {"})
    assert "--setenv=ARCTIC_CORTEX_PAT" in command
    assert "secret-value" not in " ".join(command)
    assert [word for word in command if "BASH_FUNC" in word] == []
    assert command[command.index("--") + 1 :] == spec.program
    assert "--unit=pilotage-coin" in command
