"""What runs that are over left is found and removed; what belongs to others survives."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

from pilotage.ops.doctor.leftovers import Leftovers, find_leftovers, is_held, remove_leftovers
from pilotage.processes import ProcessIdentity
from pilotage.rollouts.register import Holding, Register, current_process

LATER_S = 3600.0
"""A tmux server of this test is old enough an hour from now."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of runs, with a register and tmux servers of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    return tmp_path / "runs"


def make_run(runs: Path, name: str) -> Path:
    run = runs / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    (run / "launcher.pid").write_text("1\n")
    return run


@pytest.fixture
def live_run(runs: Path) -> Generator[Path]:
    """A run whose `lock` this process holds."""
    run = make_run(runs, "live")
    file = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield run
    os.close(file)


class Tmux:
    """tmux servers that end with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / f"tmux-{os.getuid()}"
        self.names: list[str] = []

    def start(self, name: str, run: Path | None) -> str:
        unique = f"{name}-{uuid.uuid4().hex[:6]}"
        environment = {key: value for key, value in os.environ.items() if key != "PILOTAGE_RUN"}
        if run is not None:
            environment["PILOTAGE_RUN"] = str(run)
        subprocess.run(["tmux", "-L", unique, "new-session", "-d", "sleep 60"], env=environment, check=True)
        self.names.append(unique)
        return unique

    def lives(self, name: str) -> bool:
        done = subprocess.run(["tmux", "-L", name, "has-session"], capture_output=True, check=False)
        return done.returncode == 0


@pytest.fixture
def tmux(runs: Path) -> Generator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    servers = Tmux(runs.parent)
    yield servers
    for name in servers.names:
        subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True, check=False)


def test_a_machine_without_runs_has_nothing_left(runs: Path) -> None:
    assert find_leftovers(runs, now=time.time()) == Leftovers()
    assert remove_leftovers(runs, now=time.time()) == []


def test_a_tmux_server_of_a_run_that_is_over_is_ended_and_every_other_survives(
    runs: Path, live_run: Path, tmux: Tmux
) -> None:
    over = make_run(runs, "over")
    dead, live = tmux.start("over", over), tmux.start("live", live_run)
    foreign = tmux.start("someone-else", None)
    young = find_leftovers(runs, now=time.time())
    assert young.dead_tmux_servers == ()  # its driver may be starting
    (found,) = find_leftovers(runs, now=time.time() + LATER_S).dead_tmux_servers
    assert (found.socket.name, found.run) == (dead, over)
    done = remove_leftovers(runs, now=time.time() + LATER_S)
    assert any(f"ended the tmux server {dead}" in line for line in done)
    assert [tmux.lives(name) for name in (dead, live, foreign)] == [False, True, True]


def test_only_a_lock_that_no_process_holds_is_removed(runs: Path, live_run: Path) -> None:
    over = make_run(runs, "over")
    foreign = runs / "not-a-run"
    foreign.mkdir()
    (foreign / "launcher.pid").write_text("1\n")
    assert find_leftovers(runs, now=time.time()).stale_locks == (over / "launcher.pid",)
    assert remove_leftovers(runs, now=time.time()) == [f"removed {over / 'launcher.pid'}"]
    assert not (over / "launcher.pid").exists()
    assert (over / "config.toml").exists()
    assert (live_run / "launcher.pid").exists()
    assert (foreign / "launcher.pid").exists()


def test_a_launcher_that_holds_its_own_file_keeps_its_run(runs: Path) -> None:
    run = make_run(runs, "launched")
    with (run / "launcher.pid").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(run)
        assert find_leftovers(runs, now=time.time()).stale_locks == ()
    assert not is_held(run)


def test_a_dead_owners_workspace_and_process_go_and_a_live_owners_stay(runs: Path, tmp_path: Path) -> None:
    dead_tree, live_tree, foreign = tmp_path / "dead", tmp_path / "alive", tmp_path / "foreign"
    for tree in (dead_tree, live_tree, foreign):
        tree.mkdir()
        (tree / "file").write_text("x")
    register = Register()
    nobody = ProcessIdentity(pid=2**22 - 1, started_ticks=1)
    register.write(Holding(id="dead", owner=nobody, tree=str(dead_tree)))
    register.write(Holding(id="alive", owner=current_process(), tree=str(live_tree)))
    assert find_leftovers(runs, now=time.time()).dead_holdings == ("dead",)
    assert remove_leftovers(runs, now=time.time()) == ["swept 1 holdings: 0 processes, 1 directories"]
    assert (dead_tree.exists(), live_tree.exists(), foreign.exists()) == (False, True, True)
    assert find_leftovers(runs, now=time.time()).dead_holdings == ()


def test_workspaces_of_runs_that_are_over_are_added_up_and_stay(runs: Path, live_run: Path) -> None:
    for run in (make_run(runs, "over"), live_run):
        (run / "trials" / "t1").mkdir(parents=True)
        (run / "trials" / "t1" / "log").write_bytes(b"x" * 1000)
    (found,) = find_leftovers(runs, now=time.time()).workspaces
    assert (found.path, found.count, found.size_bytes) == (runs / "over" / "trials", 1, 1000)
    remove_leftovers(runs, now=time.time())
    assert (runs / "over" / "trials" / "t1" / "log").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="flock of another process")
def test_a_run_that_another_process_holds_is_held(runs: Path) -> None:
    run = make_run(runs, "other")
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, run / "launcher.pid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert is_held(run)
        holder.kill()
    assert not is_held(run)
