"""What the doctor can find: a closed list of names, and the record of one finding."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_ADVICE = re.compile(r"[;:] (?=(?:install|allow|set|use|give|add|remove|make|run|look|lower|see|do) )")
"""Where our errors turn from what is wrong to what to do."""


class Severity(StrEnum):
    """What a finding means for a run."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not looked at here; the evidence says why."""
    WARNING = "warning"
    """A run can start, and may be hurt."""
    ERROR = "error"
    """A run cannot start, or would not do what its recipe says."""


class FindingName(StrEnum):
    """Everything that is looked at; the text after a name goes into the reference."""

    PYTHON = "python"
    """The interpreter is of the range that Pilotage supports."""
    PACKAGES = "packages"
    """Installed packages lie in the tested ranges, and none is missing that the recipe needs."""
    OPEN_FILES = "open_files"
    """The limit of open files is enough for the rollouts that run at once."""
    INOTIFY = "inotify"
    """The user's inotify instances and watches are enough."""
    USER_NAMESPACES = "user_namespaces"
    """The kernel lets this user make enough user namespaces for the sandboxes."""
    SANDBOX = "sandbox"
    """bubblewrap is there and makes a sandbox; or Harbor's environment can be used."""
    TERMINALS = "terminals"
    """Pseudo-terminals in use leave enough of the kernel's limit."""
    DISK = "disk"
    """The disks of the runs and of the trials have space."""
    WORKSPACES = "workspaces"
    """Runs that are over left less than 1 GiB of trial directories."""
    HOLDINGS = "holdings"
    """Killed runs left no sandbox, process or directory. `--fix` clears them."""
    TMUX_SERVERS = "tmux_servers"
    """No tmux server of a run that is over is left. `--fix` ends them."""
    STALE_LOCKS = "stale_locks"
    """Each `launcher.pid` is held by a process. `--fix` removes the others."""
    LIVE_DRIVER = "live_driver"
    """No other driver of this user works on this machine."""
    DOCKER_NETWORKS = "docker_networks"
    """docker holds no network of a trial whose containers are gone; it has room for about thirty."""
    CLOCK = "clock"
    """The clock agrees with the service's, or, where there is none, with the newest file of the runs."""
    LOGIN = "login"
    """The service takes the token."""
    SERVICE = "service"
    """The service answers."""
    TOKEN_EXPIRY = "token_expiry"
    """The token does not expire within a day, where it says when."""
    CAPACITY = "capacity"
    """The service has the free GPUs that the recipe's job needs."""
    JOBS = "jobs"
    """No active job with my comment is without a driver on this machine."""
    TEMPLATE = "template"
    """The model's chat template can be extended turn by turn without rendering it again."""
    TOOL_PARSER = "tool_parser"
    """A tool call that is rendered and parsed again is the same call."""
    SAMPLER = "sampler"
    """The sampler answers with ids, as many as were asked for at most."""
    SAMPLER_LOGPROBS = "sampler_logprobs"
    """Each sampled id has the log-prob that it was drawn with."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Log-probs are those at the sampling temperature, seen by sampling at two of them."""
    TEMPERATURE = "temperature"
    """Temperature 0 gives one token, a high one several."""
    TOP_P = "top_p"
    """A tiny top_p leaves one token."""
    SEED = "seed"
    """The same seed draws the same token again."""
    END_TOKEN = "end_token"
    """A completion that ended by itself has its end token as last id, and none before."""
    CONTEXT_WINDOW = "context_window"
    """The sampler has the recipe's window, and refuses a prompt that fills it."""
    PROXY = "proxy"
    """The proxy answers from where the agent runs, and only to a key that it gave."""
    TASKS = "tasks"
    """The recipe's tasks can be run, and training and held-out tasks do not overlap."""
    ORACLE = "oracle"
    """The oracle of a task earns the most that it can."""
    NO_OP = "no_op"
    """Doing nothing in that task earns less than its oracle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen of one thing."""

    name: FindingName
    severity: Severity
    evidence: str
    """What was measured or said, in one line."""
    fix: str = ""
    """What to do about it; empty unless it is a warning or an error."""

    def __post_init__(self) -> None:
        needs_fix = self.severity in (Severity.WARNING, Severity.ERROR)
        if needs_fix != bool(self.fix):
            raise ValueError(f"{self.name}: a fix belongs to warnings and errors, and to no other finding")


def ok(name: FindingName, evidence: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(name=name, severity=Severity.OK, evidence=evidence)


def skipped(name: FindingName, why: str) -> Finding:
    """Return a finding that nothing was looked at."""
    return Finding(name=name, severity=Severity.SKIPPED, evidence=why)


def warning(name: FindingName, evidence: str, *, fix: str) -> Finding:
    """Return a finding that may hurt a run."""
    return Finding(name=name, severity=Severity.WARNING, evidence=evidence, fix=fix)


def error(name: FindingName, evidence: str, *, fix: str) -> Finding:
    """Return a finding that stops a run."""
    return Finding(name=name, severity=Severity.ERROR, evidence=evidence, fix=fix)


def from_error(name: FindingName, raised: Exception, *, fix: str = "") -> Finding:
    """Return the finding that an error of ours is, cut where its message turns to what to do.

    Args:
        fix: what to do where the message does not say it.
    """
    evidence, fix_of_message = _cut(" ".join(str(raised).split()) or type(raised).__name__)
    return error(name, evidence, fix=fix_of_message or fix or "see the message")


def _cut(message: str) -> tuple[str, str]:
    found = _ADVICE.search(message)
    return (message, "") if found is None else (message[: found.start()], message[found.end() :])


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in the order of `FindingName`."""
    order = {name: index for index, name in enumerate(FindingName)}
    return sorted(findings, key=lambda finding: order[finding.name])
