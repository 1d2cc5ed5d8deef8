"""Judge the facts of a machine. Pure: the same facts and needs give the same findings."""

from collections.abc import Callable, Iterable

from packaging.specifiers import SpecifierSet

from pilotage.ops.doctor.facts import MachineFacts, PackageFact
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error, ok, skipped, warning
from pilotage.ops.doctor.need import MachineNeed

_FILES_OF_DRIVER, _FILES_PER_ROLLOUT = 256, 24
"""Of a rollout: the pipes of its sandbox and its commands, and the sockets of a model call, at both ends."""
_FEWEST_WATCHES = 8192
_TERMINALS_PER_ROLLOUT = 2
_NAMESPACES_PER_ROLLOUT = 2
_LEAST_DISK_BYTES, _GOOD_DISK_BYTES = 2 * 2**30, 10 * 2**30
"""A checkpoint of the reference policy is 8 GB without its optimizer; the demo's whole run is 60 MB."""
_MUCH_WORKSPACE_BYTES = 2**30
_CLOCK_STEP_S = 5.0


def check_machine(facts: MachineFacts, need: MachineNeed) -> list[Finding]:
    """Return one finding for each thing of the machine."""
    checks: tuple[Callable[[MachineFacts, MachineNeed], Finding], ...] = (
        _python,
        _packages,
        _open_files,
        _inotify,
        _user_namespaces,
        _sandbox,
        _terminals,
        _disk,
        _workspaces,
        _holdings,
        _tmux_servers,
        _stale_locks,
        _live_driver,
        _docker_networks,
    )
    return [check(facts, need) for check in checks]


def check_file_times(facts: MachineFacts) -> Finding:
    """Judge the clock where no service says what the time is."""
    if facts.newest_file_ahead_s > _CLOCK_STEP_S:
        return warning(
            FindingName.CLOCK,
            f"the newest file of the runs is {facts.newest_file_ahead_s:.0f} s in the future",
            fix="set the clock: turn on time synchronisation (timedatectl set-ntp true)",
        )
    return ok(FindingName.CLOCK, "no file of a run is newer than now")


# --- what is installed ---


def _python(facts: MachineFacts, need: MachineNeed) -> Finding:
    if SpecifierSet(facts.python_wanted).contains(facts.python, prereleases=True):
        return ok(FindingName.PYTHON, facts.python)
    return error(
        FindingName.PYTHON,
        f"Python {facts.python} is outside {facts.python_wanted}",
        fix="install python3.12 and make the environment anew: make clean install",
    )


def _packages(facts: MachineFacts, need: MachineNeed) -> Finding:
    missing = [p for p in facts.packages if p.installed is None and p.extra in ("", *need.extras)]
    if missing:
        extras = sorted({package.extra for package in missing} - {""})
        wanted = f"pilotage[{','.join(extras)}]" if extras else "pilotage"
        return error(
            FindingName.PACKAGES,
            f"not installed: {_names(missing)}",
            fix=f"pip install '{wanted}', or make install",
        )
    untested = [p for p in facts.packages if p.installed is not None and not p.is_tested]
    if untested:
        return warning(
            FindingName.PACKAGES,
            "outside the tested ranges: "
            + ", ".join(f"{p.name} {p.installed} (tested {p.wanted})" for p in untested),
            fix="pip install " + " ".join(f"'{p.name}{p.wanted}'" for p in untested),
        )
    count = sum(package.installed is not None for package in facts.packages)
    return ok(FindingName.PACKAGES, f"{count} packages in their tested ranges")


def _names(packages: Iterable[PackageFact]) -> str:
    return ", ".join(package.name for package in packages)


# --- limits ---


def _open_files(facts: MachineFacts, need: MachineNeed) -> Finding:
    wanted = _FILES_OF_DRIVER + _FILES_PER_ROLLOUT * need.concurrency
    limit, most = facts.open_files_limit, facts.open_files_most
    if limit is None or limit >= wanted:
        return ok(FindingName.OPEN_FILES, f"{_number(limit)}; {need.concurrency} rollouts need {wanted}")
    fix = f"ulimit -n {wanted}"
    if most is not None and most < wanted:
        fix = f"raise the hard limit, {most}, in /etc/security/limits.conf; then {fix}"
    return error(FindingName.OPEN_FILES, f"{limit}, and {need.concurrency} rollouts need {wanted}", fix=fix)


def _inotify(facts: MachineFacts, need: MachineNeed) -> Finding:
    instances, watches = facts.inotify_instances, facts.inotify_watches
    if instances is None or watches is None:
        return skipped(FindingName.INOTIFY, "this kernel states no limits")
    settings: list[str] = []
    if facts.inotify_in_use + need.concurrency > instances:
        settings.append(f"fs.inotify.max_user_instances={max(512, 2 * instances)}")
    if watches < _FEWEST_WATCHES:
        settings.append("fs.inotify.max_user_watches=65536")
    evidence = f"{facts.inotify_in_use} of {instances} instances in use; {watches} watches"
    if settings:
        return warning(FindingName.INOTIFY, evidence, fix=f"sysctl {' '.join(settings)}")
    return ok(FindingName.INOTIFY, evidence)


def _user_namespaces(facts: MachineFacts, need: MachineNeed) -> Finding:
    if not need.has_sandbox:
        return skipped(FindingName.USER_NAMESPACES, "trials run in no sandbox of this machine")
    wanted = _NAMESPACES_PER_ROLLOUT * need.concurrency
    if not facts.may_unshare:
        return error(
            FindingName.USER_NAMESPACES,
            "users without privileges may make none",
            fix="sysctl kernel.unprivileged_userns_clone=1",
        )
    limit = facts.user_namespaces
    if limit is not None and limit < wanted:
        return error(
            FindingName.USER_NAMESPACES,
            f"{limit} are allowed, and {need.concurrency} rollouts need {wanted}",
            fix=f"sysctl user.max_user_namespaces={max(15_000, wanted)}",
        )
    return ok(FindingName.USER_NAMESPACES, f"{_number(limit)} allowed")


def _sandbox(facts: MachineFacts, need: MachineNeed) -> Finding:
    if not need.has_sandbox:
        return skipped(FindingName.SANDBOX, "trials run in no sandbox of this machine")
    if facts.sandbox_complaint is not None:
        return from_error(FindingName.SANDBOX, facts.sandbox_complaint)
    return ok(FindingName.SANDBOX, "bubblewrap made a sandbox")


def _terminals(facts: MachineFacts, need: MachineNeed) -> Finding:
    used, limit = facts.terminals_in_use, facts.terminals_limit
    if limit is None:
        return skipped(FindingName.TERMINALS, "this kernel states no limit")
    evidence = f"{used} of {limit} in use"
    if used + _TERMINALS_PER_ROLLOUT * need.concurrency > limit:
        return error(
            FindingName.TERMINALS,
            f"{evidence}, and {need.concurrency} rollouts need {_TERMINALS_PER_ROLLOUT * need.concurrency}",
            fix=f"end what holds them (`tmux ls`), or sysctl kernel.pty.max={2 * limit}",
        )
    return ok(FindingName.TERMINALS, evidence)


def _disk(facts: MachineFacts, need: MachineNeed) -> Finding:
    evidence = ", ".join(f"{disk.path}: {_size(disk.free_bytes)} free" for disk in facts.disks)
    least = min(facts.disks, key=lambda disk: disk.free_bytes)
    fix = f"make room on the disk of {least.path}, or put the runs elsewhere with --runs-dir"
    if least.free_bytes < _LEAST_DISK_BYTES:
        return error(FindingName.DISK, evidence, fix=fix)
    if least.free_bytes < _GOOD_DISK_BYTES:
        return warning(FindingName.DISK, evidence, fix=fix)
    return ok(FindingName.DISK, evidence)


# --- what is left, and what runs ---


def _workspaces(facts: MachineFacts, need: MachineNeed) -> Finding:
    found = facts.leftovers.workspaces
    if not found:
        return ok(FindingName.WORKSPACES, "none left")
    total = sum(each.size_bytes for each in found)
    at_least = "" if all(each.is_whole for each in found) else "at least "
    evidence = f"{sum(each.count for each in found)} trial directories left, {at_least}{_size(total)}"
    if total < _MUCH_WORKSPACE_BYTES and not at_least:
        return ok(FindingName.WORKSPACES, evidence)
    paths = " ".join(str(each.path) for each in found)
    return warning(FindingName.WORKSPACES, evidence, fix=f"rm -r {paths}")


def _holdings(facts: MachineFacts, need: MachineNeed) -> Finding:
    found = facts.leftovers.dead_holdings
    if not found:
        return ok(FindingName.HOLDINGS, "no sandbox, process or directory of a killed run")
    return warning(
        FindingName.HOLDINGS,
        f"{len(found)} left by killed runs: {_some(found)}",
        fix="`pilotage doctor --fix` or `pilotage sweep`; every start of a run does it too",
    )


def _tmux_servers(facts: MachineFacts, need: MachineNeed) -> Finding:
    found = facts.leftovers.dead_tmux_servers
    if not found:
        return ok(FindingName.TMUX_SERVERS, "none of a run that is over")
    names = [f"{server.socket.name} of {server.run}" for server in found]
    commands = "; ".join(f"tmux -L {server.socket.name} kill-server" for server in found)
    return warning(
        FindingName.TMUX_SERVERS, f"of runs that are over: {_some(names)}", fix=f"--fix, or {commands}"
    )


def _stale_locks(facts: MachineFacts, need: MachineNeed) -> Finding:
    found = [str(path) for path in facts.leftovers.stale_locks]
    if not found:
        return ok(FindingName.STALE_LOCKS, "none")
    return warning(
        FindingName.STALE_LOCKS, f"no process holds {_some(found)}", fix=f"--fix, or rm {' '.join(found)}"
    )


def _live_driver(facts: MachineFacts, need: MachineNeed) -> Finding:
    if not facts.drivers:
        return ok(FindingName.LIVE_DRIVER, "none")
    found = [f"process {driver.pid}: {driver.command}" for driver in facts.drivers]
    return warning(
        FindingName.LIVE_DRIVER,
        _some(found),
        fix="wait until it has ended, or stop it: two runs share this machine's cores and memory",
    )


def _docker_networks(facts: MachineFacts, need: MachineNeed) -> Finding:
    found = facts.left_networks
    if not found:
        return ok(FindingName.DOCKER_NETWORKS, "none of a trial without containers")
    return warning(
        FindingName.DOCKER_NETWORKS,
        f"{len(found)} of trials without containers: {_some(found)}",
        fix=f"docker network rm {' '.join(found)}",
    )


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")


def _number(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
