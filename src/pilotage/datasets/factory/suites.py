"""Run tests of a tree in warm servers: each run in a copy of its own, nothing of it left.

Invariant: a run sees the files that it is given and no others; what it writes is gone afterwards.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from pilotage.datasets.factory import suite_server
from pilotage.errors import PilotageError

TEST_CPU_S = 3.0
"""Of one test that a bug may break. CPU time, so that a busy machine changes no verdict."""
TEST_WALL_S = 10.0
"""For those that wait for ever, which takes no CPU time."""
RUN_WALL_S = 30.0
SUITE_WALL_S = 300.0
_STOP_POLL_S = 0.2


class FactoryStoppedError(PilotageError):
    """The caller stopped the factory; what was proven until then is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """What to run."""

    template: Path
    """Directory that is copied for the run."""
    changed: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Path -> content of files that differ from the template's."""
    paths: Sequence[str]
    """Directories, relative to the tree, from which the package is imported."""
    modules: Sequence[str]
    """Top-level names of the package, which must not be imported yet."""
    files: Sequence[str] = ()
    """Of tests, relative to the tree; none is what the package's own settings say."""
    tests: Sequence[str] | None = None
    """Ids of the tests to run; None is all of the files'."""
    shuffle: str | None = None
    """Seed of the order; None is the files' own."""
    record: Sequence[str] = ()
    """Starts of the paths whose lines are recorded."""
    keep_bytecode: bool = False
    """Copy the bytecode of test files, which never change, back into the template."""
    stop_at_timeout: bool = True
    """Else a test that takes too long fails, and the others go on."""
    cpu_s: float = TEST_CPU_S
    test_wall_s: float = TEST_WALL_S
    wall_s: float = RUN_WALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one test failed."""

    error: str
    """Name of the exception's class."""
    message: str
    line: int
    """Of the test's body in its file, from 1; 0 where the failure is not below the test's body."""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name -> repr of what the test was parametrized with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReply:
    """What became of the tests."""

    refused: str = ""
    """Why nothing was run."""
    timed_out: bool = False
    """A test, or the whole run, took too long; nothing else is known."""
    died: bool = False
    """The process ended in the middle; nothing else is known."""
    outcomes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Test id -> passed, failed or skipped, in the order of the run."""
    cpu_s: Mapping[str, float] = field(default_factory=dict[str, float])
    failures: Mapping[str, Failure] = field(default_factory=dict[str, Failure])
    collection_errors: Sequence[str] = ()
    lines: Mapping[str, Mapping[str, Sequence[int]]] = field(
        default_factory=dict[str, Mapping[str, Sequence[int]]]
    )
    """Path -> line -> indices, in the order of the run, of the tests that pass it."""
    run_s: float = 0.0
    """Wall time, without waiting for a server."""

    def of(self, outcome: str) -> list[str]:
        """Return the sorted ids of the tests with an outcome."""
        return sorted(name for name, found in self.outcomes.items() if found == outcome)


def _reply(line: bytes, scratch: Path, run_s: float) -> SuiteReply:
    # Nothing of a machine's directories may reach an issue.
    here = json.dumps(str(scratch))[1:-1].encode()
    content: dict[str, Any] = orjson.loads(line.replace(here, b"/tmp"))
    failures = {name: Failure(**record) for name, record in content.pop("failures", {}).items()}
    return SuiteReply(failures=failures, run_s=round(run_s, 3), **content)


def _environment(home: Path) -> dict[str, str]:
    """Return all that a package's tests see of the environment: no key, and the same everywhere."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


class _Server:
    def __init__(self, home: Path) -> None:
        # -P: a file of this directory must not be found under the name of a package's module.
        self._process = subprocess.Popen(
            [sys.executable, "-P", suite_server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(home),
            start_new_session=True,
        )

    def ask(self, request: bytes, stop: threading.Event) -> bytes:
        """Return the reply's line; empty where the server is gone.

        Raises:
            FactoryStoppedError: `stop` was set before there was a reply.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        while not select.select([self._process.stdout], [], [], _STOP_POLL_S)[0]:
            if stop.is_set():
                raise FactoryStoppedError("stopped")
        return self._process.stdout.readline()

    def close(self) -> None:
        # SIGKILL ends what it runs too: every child asked to die with it.
        self._process.kill()
        self._process.communicate()


class SuitePool:
    """`num_workers` servers; `submit` queues a run, whoever is free takes it."""

    def __init__(self, num_workers: int, *, scratch: Path, stop: threading.Event) -> None:
        """Use `scratch`, which must exist, for the copies; once `stop` is set, every run raises."""
        self._scratch = scratch
        self._stop = stop
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="suite")
        # A server dies with the thread that started it, so each thread has its own and none is shared.
        self._local = threading.local()
        self._servers: list[_Server] = []
        self._lock = threading.Lock()  # guards _servers and _count
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for server in self._servers:
                server.close()
        self._threads.shutdown(wait=True)

    def submit(self, run: SuiteRun) -> Future[SuiteReply]:
        """Queue a run."""
        return self._threads.submit(self._run, run)

    def _started(self) -> _Server:
        with self._lock:
            self._local.server = _Server(self._scratch)
            self._servers.append(self._local.server)
        return self._local.server

    def _new_directory(self) -> Path:
        with self._lock:
            self._count += 1
            name = f"{self._count:08d}"  # of one length: pytest shortens long texts
        directory = self._scratch / name
        directory.mkdir()
        return directory

    def _run(self, run: SuiteRun) -> SuiteReply:
        if self._stop.is_set():
            raise FactoryStoppedError("stopped")
        began = time.monotonic()
        directory = self._new_directory()
        tree = directory / "tree"
        try:
            shutil.copytree(run.template, tree, symlinks=True)
            for path, content in run.changed.items():
                (tree / path).write_bytes(content)
            line = self._ask(_request(run, tree))
            if run.keep_bytecode:
                _copy_test_bytecode(tree, run.template)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return _reply(line, directory, time.monotonic() - began)

    def _ask(self, request: bytes) -> bytes:
        server: _Server = getattr(self._local, "server", None) or self._started()
        # A server that a run took with it is replaced, and the run counts as one that died.
        line = server.ask(request, self._stop)
        if not line:
            self._started()
        return line or b'{"died": true}'


def _request(run: SuiteRun, tree: Path) -> bytes:
    return orjson.dumps(
        {
            "tree": str(tree),
            "paths": run.paths,
            "modules": run.modules,
            "files": run.files,
            "tests": run.tests,
            "shuffle": run.shuffle,
            "record": run.record,
            "keep_bytecode": run.keep_bytecode,
            "stop_at_timeout": run.stop_at_timeout,
            "cpu_s": run.cpu_s,
            "test_wall_s": run.test_wall_s,
            "wall_s": run.wall_s,
        }
    )


def _copy_test_bytecode(tree: Path, template: Path) -> None:
    for path in tree.rglob("__pycache__/*-pytest-*.pyc"):
        target = template / path.relative_to(tree)
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(path, target)
