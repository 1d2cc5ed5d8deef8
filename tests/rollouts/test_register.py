"""The sweep clears what a dead owner left, and touches nothing of a living one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotage.errors import ConfigError
from pilotage.processes import ProcessIdentity, identify, is_running, kill
from pilotage.rollouts.processes import MARKER
from pilotage.rollouts.register import (
    Holding,
    Register,
    SweepReport,
    current_process,
    default_directory,
    private_directory,
)


@pytest.fixture
def register(tmp_path: Path) -> Register:
    return Register(tmp_path / "register")


@pytest.fixture
def dead() -> ProcessIdentity:
    process = subprocess.Popen(["sleep", "60"])
    identity = identify(process.pid)
    process.kill()
    process.wait()
    assert identity is not None
    return identity


def sleeper(**environment: str) -> tuple[subprocess.Popen[bytes], ProcessIdentity]:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, **environment})
    identity = identify(process.pid)
    assert identity is not None
    return process, identity


def test_a_sweep_kills_and_removes_what_a_dead_owner_held(
    register: Register, dead: ProcessIdentity, tmp_path: Path
) -> None:
    process, identity = sleeper()
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    register.write(Holding(id="a", owner=dead, processes=(identity,), tree=str(tree)))

    assert register.sweep() == SweepReport(holdings=1, killed_processes=1, removed_trees=1)

    assert process.wait(5) == -9
    assert not tree.exists()
    assert register.holdings() == []
    assert register.sweep() == SweepReport()


def test_a_sweep_leaves_a_living_owner_alone(register: Register, tmp_path: Path) -> None:
    process, identity = sleeper()
    tree = tmp_path / "tree"
    tree.mkdir()
    holding = Holding(id="a", owner=current_process(), processes=(identity,), tree=str(tree))
    register.write(holding)

    assert register.sweep() == SweepReport()

    assert process.poll() is None
    assert tree.exists()
    assert register.holdings() == [holding]
    process.kill()
    process.wait()


def test_a_process_id_that_was_given_to_somebody_else_is_not_killed(
    register: Register, dead: ProcessIdentity
) -> None:
    process, identity = sleeper()
    earlier = ProcessIdentity(pid=identity.pid, started_ticks=identity.started_ticks - 1)
    register.write(Holding(id="a", owner=dead, processes=(earlier,)))

    assert register.sweep().killed_processes == 0

    assert process.poll() is None
    process.kill()
    process.wait()


def test_an_owner_whose_id_was_given_to_somebody_else_is_dead(register: Register) -> None:
    me = current_process()
    earlier = ProcessIdentity(pid=me.pid, started_ticks=me.started_ticks - 1)
    register.write(Holding(id="a", owner=earlier))

    assert register.sweep().holdings == 1


def test_marked_processes_are_found_wherever_they_went(register: Register, dead: ProcessIdentity) -> None:
    ours, _ = sleeper(**{MARKER: "plain-1"})
    other, _ = sleeper(**{MARKER: "plain-11"})
    register.write(Holding(id="plain-1", owner=dead, is_marked=True))

    assert register.sweep().killed_processes == 1

    assert ours.wait(5) == -9
    assert other.poll() is None  # the marker is compared whole, not as a prefix
    other.kill()
    other.wait()


def test_a_tree_that_was_made_unwritable_is_removed(
    register: Register, dead: ProcessIdentity, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "locked" / "inner").mkdir(parents=True)
    (tree / "locked" / "inner" / "file").touch()
    (tree / "locked" / "inner").chmod(0)
    (tree / "locked").chmod(0)
    register.write(Holding(id="a", owner=dead, tree=str(tree)))

    assert register.sweep().removed_trees == 1
    assert not tree.exists()


def test_an_unreadable_entry_is_reported_and_does_not_stop_the_sweep(
    register: Register, dead: ProcessIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    (register.directory / "a.json").write_text("{")
    register.write(Holding(id="b", owner=dead))

    assert register.sweep().holdings == 1
    assert "a.json is unreadable" in caplog.text


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)

    with pytest.raises(ConfigError, match="mode 0700"):
        private_directory(tmp_path / "open")


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(ConfigError, match="must be a directory of yours"):
        private_directory(tmp_path / "link")


def test_the_default_directory_belongs_to_this_user() -> None:
    assert default_directory().name in ("pilotage", f"pilotage-{os.getuid()}")


def test_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = identify(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped

    assert identify(process.pid) is None
    assert identity is None or not is_running(identity)
    assert identity is None or not kill(identity)
    process.wait()


def test_a_sweep_removes_what_a_killed_writer_left_and_not_what_is_being_written(register: Register) -> None:
    for name, age_s in (("old", 3600.0), ("new", 0.0)):
        path = register.directory / f"{name}.partial"
        path.write_text("{")
        written_at = time.time() - age_s
        os.utime(path, (written_at, written_at))
    register.sweep()
    assert [path.name for path in register.directory.iterdir()] == ["new.partial"]
