"""Run a package's tests in forked children: pytest is imported once, the package only in the child.

    python -P suite_server.py      one JSON request a line in, one JSON reply a line out

Whatever a buggy program does stays in its child: limits on CPU time, memory and file size, a session of
its own, and, when the reply is there or the time is up, SIGKILL for it and for every process that came of
it. This file imports nothing of Pilotage, so that a package under test finds no module in its way.

Request: see `SuiteRun` in `suites.py`, whose fields these are. Reply: see `SuiteReply` there.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_MESSAGE = 3000
_LIKELY = (
    "asyncio", "calendar", "collections.abc", "concurrent.futures", "configparser", "copy", "csv", "ctypes",
    "datetime", "decimal", "difflib", "doctest", "email.message", "fractions", "functools", "gettext",
    "getpass", "hashlib", "heapq", "html.parser", "http.client", "http.server", "inspect", "json", "locale",
    "logging.handlers", "multiprocessing", "pickle", "platform", "pprint", "queue", "shelve", "shlex",
    "socket", "socketserver", "sqlite3", "ssl", "statistics", "string", "struct", "subprocess", "tarfile",
    "textwrap", "timeit", "tomllib", "tty", "typing", "unittest.mock", "urllib.request", "uuid", "weakref",
    "xml.dom.minidom", "xml.etree.ElementTree", "zipfile", "zoneinfo",
)  # fmt: skip
"""Of the standard library, what packages and their tests import: once here, not in every child."""
_libc = ctypes.CDLL(None)


class LineRecorder:
    """Notes which test is the first to pass which line, again for every test.

    Uses `sys.monitoring`: a line reports once a test and is then free, so that recording costs little.
    """

    def __init__(self, root: Path, prefixes: list[str]) -> None:
        """Record the lines of files below `root` whose path starts with one of `prefixes`."""
        self.lines: dict[str, dict[int, list[int]]] = {}
        self._prefixes = tuple(f"{root}/{prefix}" for prefix in prefixes)
        self._root = f"{root}/"
        self._test: int | None = None
        self._tool = sys.monitoring.COVERAGE_ID

    def start(self) -> None:
        """Begin to listen."""
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(self._tool, "pilotage")
        sys.monitoring.register_callback(self._tool, events.LINE, self._on_line)
        sys.monitoring.set_events(self._tool, events.LINE)

    def next_test(self, index: int) -> None:
        """Count what runs from now on for test `index`."""
        self._test = index
        sys.monitoring.restart_events()

    def _on_line(self, code: Any, line: int) -> object:
        if self._test is not None and code.co_filename.startswith(self._prefixes):
            path = code.co_filename.removeprefix(self._root)
            tests = self.lines.setdefault(path, {}).setdefault(line, [])
            if not tests or tests[-1] != self._test:
                tests.append(self._test)
        return sys.monitoring.DISABLE


class Results:
    """A pytest plugin that chooses, orders and times tests and keeps what became of each."""

    def __init__(self, request: dict[str, Any], recorder: LineRecorder | None) -> None:
        self._request = request
        self._recorder = recorder
        self.outcomes: dict[str, str] = {}
        self.cpu_s: dict[str, float] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.collection_errors: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that are asked for, in the order that the seed gives."""
        if self._request["tests"] is not None:
            wanted = set(self._request["tests"])
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
            items[:] = [item for item in items if item.nodeid in wanted]
        if self._request["shuffle"] is not None:
            items.sort(key=lambda item: item.nodeid)
            random.Random(self._request["shuffle"]).shuffle(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self.collection_errors.append(f"{report.nodeid}: {reason}"[:_MAX_MESSAGE])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Give each test its CPU time, the same random numbers, and its place among the lines."""
        index = len(self.cpu_s)
        random.seed(0)
        if self._recorder:
            self._recorder.next_test(index)
        signal.setitimer(signal.ITIMER_PROF, self._request["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, self._request["test_wall_s"])
        began = time.process_time()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.cpu_s[item.nodeid] = round(time.process_time() - began, 4)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the first failure of a test; an expected failure, or an unexpected pass, says nothing."""
        report = yield
        name = item.nodeid
        if report.failed and name not in self.failures:
            self.outcomes[name] = "failed"
            if call.excinfo is not None:
                self.failures[name] = _failure(item, call.excinfo, report)
        elif report.skipped or hasattr(report, "wasxfail"):
            self.outcomes.setdefault(name, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")
        return report


def _failure(
    item: pytest.Item, error: pytest.ExceptionInfo[BaseException], report: pytest.TestReport
) -> dict[str, Any]:
    crash = getattr(report.longrepr, "reprcrash", None)
    name = getattr(item, "originalname", item.name)
    lines = [
        entry.lineno + 1
        for entry in error.traceback
        if entry.path == item.path and entry.frame.code.raw.co_name == name
    ]
    given = getattr(item, "funcargs", {})
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return {
        "error": error.type.__name__,
        "message": (crash.message if crash else str(error.value))[:_MAX_MESSAGE],
        "line": lines[-1] if lines else 0,
        # What a fixture makes of a parameter is not what the test sees.
        "parameters": {key: _repr(value) for key, value in parameters.items() if given.get(key) is value},
    }


def _repr(value: object) -> str:
    try:
        return repr(value)[:_MAX_MESSAGE]
    except Exception:  # noqa: BLE001  # the buggy package's own repr
        return "<no repr>"


def _limit(wall_s: float) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Inherited: a process that escapes every sweep still ends.
    cpu_s = int(wall_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def _arguments(request: dict[str, Any], scratch: Path) -> list[str]:
    arguments = ["-p", "no:cacheprovider", "-p", "no:doctest", f"--basetemp={scratch}/t", "--color=no"]
    arguments += ["--verbosity=0", "--maxfail=1000000"]
    # The other styles of traceback, which nobody reads, cost more than most tests.
    arguments += ["--rootdir=.", "--tb=native", "-W", "ignore::pytest.PytestConfigWarning"]
    if request["tests"] is None:
        arguments.append("--continue-on-collection-errors")
    return [*arguments, *request["files"]]


def _run(request: dict[str, Any], reply: int) -> None:
    """Run one request in this process, which is the child's, and write the reply."""
    tree = Path(request["tree"])
    os.chdir(tree)
    paths = [str(tree / path) for path in request["paths"]]
    sys.path[0:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for variable in ("HOME", "TMPDIR"):
        os.environ[variable] = f"{tree.parent}/{variable.lower()}"
        os.mkdir(os.environ[variable])
    tempfile.tempdir = None
    if taken := sorted(set(request["modules"]) & sys.modules.keys()):
        _write(reply, {"refused": f"pytest itself uses {', '.join(taken)}"})
        return
    sys.dont_write_bytecode = not request["keep_bytecode"]
    recorder = LineRecorder(tree, request["record"]) if request["record"] else None

    def out_of_time(*_: object) -> None:
        if not request["stop_at_timeout"]:
            raise TimeoutError("the test takes too long")
        _write(reply, {"timed_out": True})
        os._exit(0)

    signal.signal(signal.SIGPROF, out_of_time)
    signal.signal(signal.SIGALRM, out_of_time)
    results = Results(request, recorder)
    if recorder:
        recorder.start()
    arguments = _arguments(request, tree.parent)
    # The package's own options choose tests, but may also name plugins that are not here.
    if pytest.main(arguments, plugins=[results]) == pytest.ExitCode.USAGE_ERROR:
        pytest.main(["-o", "addopts=", *arguments], plugins=[results])
    _write(
        reply,
        {
            "outcomes": results.outcomes,
            "cpu_s": results.cpu_s,
            "failures": results.failures,
            "collection_errors": results.collection_errors,
            "lines": recorder.lines if recorder else {},
        },
    )


def _write(descriptor: int, reply: dict[str, Any]) -> None:
    content = json.dumps(reply).encode() + b"\n"
    while content:
        content = content[os.write(descriptor, content) :]


def _child(request: dict[str, Any], reply: int) -> None:
    try:
        os.setsid()
        _limit(request["wall_s"])
        _run(request, reply)
    finally:
        os._exit(0)  # no clean-up of the parent's: not its buffers, not its exit hooks


def _read_line(descriptor: int, wall_s: float) -> bytes | None:
    """Return a line, b"" where the writers are gone without one, or None after `wall_s`."""
    deadline = time.monotonic() + wall_s
    content = bytearray()
    while not content.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(descriptor, 1 << 20)
        if not piece:
            return b""
        content += piece
    return bytes(content)


def _kill_descendants(group: int) -> None:
    """Kill and reap every child until none is left; orphans of a child become our children."""
    # All of the group at one instant, so that no process that only forks outruns the loop.
    with contextlib.suppress(ProcessLookupError):  # it ended before it made a group
        os.killpg(group, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def answer(request: dict[str, Any]) -> bytes:
    """Run one request in a fork and return the reply's line."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(request, write)
    os.close(write)
    line = _read_line(read, request["wall_s"])
    os.close(read)
    _kill_descendants(pid)
    if line is None:
        return b'{"timed_out": true}\n'
    return line or b'{"died": true}\n'


def _warm_up() -> None:
    """Import what pytest would import in every child."""
    from _pytest.config import default_plugins

    for name in (*(f"_pytest.{plugin}" for plugin in default_plugins), *_LIKELY):
        with contextlib.suppress(ImportError):  # a Python that was built without it
            importlib.import_module(name)
    gc.freeze()


def main() -> None:
    """Answer requests until standard input ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    _warm_up()
    for line in requests:
        replies.write(answer(json.loads(line)))
        replies.flush()


if __name__ == "__main__":
    main()
