"""Facts of a machine in, findings out: one broken fact gives its one finding, with the fix for it."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ops.doctor.good import GOOD, NEED, package

from pilotage.errors import ConfigError
from pilotage.ops.doctor.facts import DiskFact, DriverFact, gather, is_driver
from pilotage.ops.doctor.findings import Finding, FindingName, Severity
from pilotage.ops.doctor.leftovers import Leftovers, TmuxServer, Workspaces
from pilotage.ops.doctor.machine import check_file_times, check_machine
from pilotage.ops.doctor.need import MachineNeed

RUN = Path("runs/first")
NO_BUBBLEWRAP = ConfigError(
    "the sandbox needs bwrap: install bubblewrap and util-linux (apt-get install bubblewrap)"
)
NO_NAMESPACES = ConfigError("bubblewrap cannot make a sandbox here: No permissions; allow user namespaces")
LEFT_TMUX = Leftovers(dead_tmux_servers=(TmuxServer(socket=Path("/tmp/tmux-0/first"), run=RUN),))
BIG = Workspaces(path=RUN / "trials", count=3, size_bytes=2 * 2**30)

BROKEN: list[tuple[FindingName, Severity, dict[str, Any], str]] = [
    (FindingName.PYTHON, Severity.ERROR, {"python": "3.11.9"}, "install python3.12"),
    (
        FindingName.PACKAGES,
        Severity.ERROR,
        {"packages": (package("torch", installed=None, extra="local"),)},
        "pip install 'pilotage[local]'",
    ),
    (
        FindingName.PACKAGES,
        Severity.WARNING,
        {"packages": (package("numpy", installed="3.0", is_tested=False),)},
        "pip install 'numpy>=1,<2'",
    ),
    (FindingName.OPEN_FILES, Severity.ERROR, {"open_files_limit": 256}, "ulimit -n 448"),
    (
        FindingName.OPEN_FILES,
        Severity.ERROR,
        {"open_files_limit": 256, "open_files_most": 300},
        "raise the hard limit, 300",
    ),
    (
        FindingName.INOTIFY,
        Severity.WARNING,
        {"inotify_in_use": 125},
        "sysctl fs.inotify.max_user_instances=512",
    ),
    (
        FindingName.INOTIFY,
        Severity.WARNING,
        {"inotify_watches": 100},
        "sysctl fs.inotify.max_user_watches=65536",
    ),
    (FindingName.USER_NAMESPACES, Severity.ERROR, {"may_unshare": False}, "unprivileged_userns_clone=1"),
    (FindingName.USER_NAMESPACES, Severity.ERROR, {"user_namespaces": 0}, "user.max_user_namespaces=15000"),
    (FindingName.SANDBOX, Severity.ERROR, {"sandbox_complaint": NO_BUBBLEWRAP}, "install bubblewrap"),
    (FindingName.SANDBOX, Severity.ERROR, {"sandbox_complaint": NO_NAMESPACES}, "allow user namespaces"),
    (FindingName.TERMINALS, Severity.ERROR, {"terminals_in_use": 4090}, "sysctl kernel.pty.max=8192"),
    (
        FindingName.DISK,
        Severity.ERROR,
        {"disks": (DiskFact(path=Path("runs"), free_bytes=2**20),)},
        "make room on the disk of runs",
    ),
    (
        FindingName.DISK,
        Severity.WARNING,
        {"disks": (*GOOD.disks, DiskFact(path=Path("trials"), free_bytes=3 * 2**30))},
        "make room on the disk of trials",
    ),
    (
        FindingName.WORKSPACES,
        Severity.WARNING,
        {"leftovers": Leftovers(workspaces=(BIG,))},
        "rm -r runs/first/trials",
    ),
    (
        FindingName.HOLDINGS,
        Severity.WARNING,
        {"leftovers": Leftovers(dead_holdings=("sandbox-1",))},
        "pilotage sweep",
    ),
    (FindingName.TMUX_SERVERS, Severity.WARNING, {"leftovers": LEFT_TMUX}, "tmux -L first kill-server"),
    (
        FindingName.STALE_LOCKS,
        Severity.WARNING,
        {"leftovers": Leftovers(stale_locks=(RUN / "launcher.pid",))},
        "rm runs/first/launcher.pid",
    ),
    (
        FindingName.LIVE_DRIVER,
        Severity.WARNING,
        {"drivers": (DriverFact(pid=7, command="pilotage train r.toml"),)},
        "wait until it has ended",
    ),
    (
        FindingName.DOCKER_NETWORKS,
        Severity.WARNING,
        {"left_networks": ("a_default",)},
        "docker network rm a_default",
    ),
]


def above_ok(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.fix]


@pytest.mark.parametrize(
    ("name", "severity", "broken", "fix"), BROKEN, ids=[f"{n}-{f[:24]}" for n, _, _, f in BROKEN]
)
def test_a_broken_fact_gives_its_one_finding_with_the_fix(
    name: FindingName, severity: Severity, broken: dict[str, Any], fix: str
) -> None:
    (found,) = above_ok(check_machine(dataclasses.replace(GOOD, **broken), NEED))
    assert (found.name, found.severity) == (name, severity)
    assert fix in found.fix


def test_a_good_machine_has_nothing_above_ok_and_every_thing_once() -> None:
    findings = check_machine(GOOD, NEED)
    assert above_ok(findings) == []
    assert len({finding.name for finding in findings}) == len(findings) == 14


def test_a_file_from_the_future_means_that_the_clock_went_back() -> None:
    assert check_file_times(GOOD).severity is Severity.OK
    found = check_file_times(dataclasses.replace(GOOD, newest_file_ahead_s=90.0))
    assert (found.name, found.severity) == (FindingName.CLOCK, Severity.WARNING)
    assert "90 s in the future" in found.evidence
    assert "timedatectl set-ntp true" in found.fix


def test_a_need_that_grows_makes_a_limit_too_low() -> None:
    found = above_ok(check_machine(GOOD, dataclasses.replace(NEED, concurrency=512)))
    assert {finding.name for finding in found} == {FindingName.OPEN_FILES, FindingName.INOTIFY}


def test_a_machine_without_a_sandbox_is_not_asked_for_one() -> None:
    facts = dataclasses.replace(GOOD, sandbox_complaint=NO_BUBBLEWRAP, user_namespaces=0)
    findings = check_machine(facts, dataclasses.replace(NEED, has_sandbox=False))
    assert above_ok(findings) == []
    skipped = {finding.name for finding in findings if finding.severity is Severity.SKIPPED}
    assert skipped == {FindingName.SANDBOX, FindingName.USER_NAMESPACES}


def test_a_missing_package_of_an_extra_that_the_recipe_does_not_need_is_no_finding() -> None:
    facts = dataclasses.replace(GOOD, packages=(package("torch", installed=None, extra="local"),))
    assert above_ok(check_machine(facts, MachineNeed(extras=("agents",)))) == []


def test_few_left_workspaces_are_told_and_no_warning() -> None:
    small = Leftovers(workspaces=(dataclasses.replace(BIG, size_bytes=2**20),))
    findings = check_machine(dataclasses.replace(GOOD, leftovers=small), NEED)
    assert above_ok(findings) == []
    assert "3 trial directories left, 1 MiB" in {f.name: f.evidence for f in findings}[FindingName.WORKSPACES]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pilotage train recipes/demo.toml", True),
        ("/env/bin/python /env/bin/pilotage train recipes/demo.toml --resume", True),
        ("python3.12 -m pilotage train recipes/demo.toml", True),
        ("python -m pilotage.cli.supervisor runs/first", True),
        ("pilotage doctor recipes/demo.toml train", False),
        ("vim train", False),
        ("python my_script.py train", False),
        ("tmux new-session pilotage train recipes/demo.toml", False),
        ("bash", False),
    ],
)
def test_a_driver_is_known_by_its_command_line(command: str, expected: bool) -> None:
    assert is_driver(command.split()) is expected


def test_this_machine_is_measured_and_its_packages_are_those_of_pilotage(tmp_path: Path) -> None:
    facts = gather(tmp_path / "runs", MachineNeed())
    assert facts.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    known = {package.name: package for package in facts.packages}
    assert known["numpy"].is_tested
    assert known["torch"].extra == "local"
    assert "pytest" not in known  # of an extra that takes part in no run
    assert facts.disks[0].free_bytes > 0
    assert facts.terminals_limit is None or facts.terminals_in_use <= facts.terminals_limit


def test_a_running_driver_is_seen_and_this_process_is_none(tmp_path: Path) -> None:
    program = tmp_path / "pilotage"
    program.write_text("import time; print('ready', flush=True); time.sleep(60)")
    driver = subprocess.Popen([sys.executable, program, "train", "r.toml"], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        driver.stdout.readline()
        found = {fact.pid: fact.command for fact in gather(tmp_path, MachineNeed()).drivers}
        assert found[driver.pid].endswith("pilotage train r.toml")
    finally:
        driver.kill()
        driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()
