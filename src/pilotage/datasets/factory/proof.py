"""Prove bugs by the package's own tests: which are stable, which see a bug, and which it breaks.

A test is stable where it passes on the clean tree twice, once in the files' order and once in random order.
A bug is valid where it makes stable tests fail that then pass on the clean tree, alone among themselves and
in another random order. What hangs, dies, runs out of memory or breaks the collection of tests is no bug to
look for: there would be nothing to tell, or everything would fail.
"""

import py_compile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pilotage.datasets.factory.suites import SUITE_WALL_S, Failure, SuiteReply, SuiteRun
from pilotage.datasets.factory.trees import Layout
from pilotage.datasets.localization_tasks import write_files
from pilotage.errors import PackageError

MAX_TESTS = 60
"""That one proof runs."""
MIN_STABLE = 5
SLOW_TEST_CPU_S = 1.0
"""A slower test proves no bug: a third of what a test may take, so that no verdict hangs on the machine."""


class Runner(Protocol):
    """Runs tests: a `SuitePool`."""

    def submit(self, run: SuiteRun) -> Future[SuiteReply]:
        """Queue a run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A package's stable tests."""

    stable: tuple[str, ...]
    """Sorted ids."""
    lines: Mapping[str, Mapping[int, tuple[str, ...]]]
    """Path -> line -> ids of the stable tests that pass it."""
    breadth: Mapping[str, int]
    """Test id -> how many of the package's lines it passes."""

    def witnesses(self, path: str, first: int, last: int) -> list[str]:
        """Return at most MAX_TESTS stable tests that pass one of the lines, the narrowest first.

        Narrow tests are fast, and make an issue that speaks of little else.
        """
        by_line = self.lines.get(path, {})
        found = {name for line in range(first, last + 1) for name in by_line.get(line, ())}
        return sorted(found, key=lambda name: (self.breadth[name], name))[:MAX_TESTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests say of a bug."""

    dropped: str = ""
    """Why it is none; empty where it is valid."""
    fail_to_pass: Mapping[str, Failure] = field(default_factory=dict[str, Failure])
    pass_to_pass: tuple[str, ...] = ()
    """Sorted ids of those that see the changed lines and pass all the same."""
    run_s: float = 0.0
    """Wall time of the runs that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A package's tree, ready to be tested."""

    label: str
    layout: Layout
    template: Path

    def run(self, **options: object) -> SuiteRun:
        """Return a run in this tree."""
        fixed = {
            "template": self.template,
            "paths": [self.layout.source_root],
            "modules": self.layout.modules,
        }
        return SuiteRun(**fixed, **options)  # pyright: ignore[reportArgumentType]


def set_up(label: str, layout: Layout, files: Mapping[str, bytes], template: Path) -> Bench:
    """Write a package's tree, with the bytecode of its clean sources, into the new directory `template`."""
    write_files(template, files)
    for path in layout.sources:
        try:
            # Checked by hash: an edit within one second that keeps the size must not run as the clean file.
            py_compile.compile(
                str(template / path),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
            )
        except (py_compile.PyCompileError, ValueError):
            continue
    return Bench(label=label, layout=layout, template=template)


def find_suite(bench: Bench, runner: Runner, *, seed: int) -> Suite:
    """Run the whole suite twice on the clean tree, the first time recording lines.

    Raises:
        PackageError: there are no tests, or they hang, die, or mostly fail.
    """
    limits = {"stop_at_timeout": False, "wall_s": SUITE_WALL_S}
    starts = [path if path.endswith(".py") else f"{path}/" for path in _tops(bench.layout)]
    recorded = runner.submit(bench.run(record=starts, keep_bytecode=True, **limits)).result()
    _refuse(bench.label, recorded)
    again = runner.submit(bench.run(shuffle=f"{seed} {bench.label}", **limits)).result()
    _refuse(bench.label, again)
    slow = {name for name, cpu_s in recorded.cpu_s.items() if cpu_s > SLOW_TEST_CPU_S}
    stable = sorted((set(recorded.of("passed")) & set(again.of("passed"))) - slow)
    num_run = len(recorded.outcomes) - len(recorded.of("skipped"))
    if len(stable) < max(MIN_STABLE, num_run / 2):
        reasons = [*recorded.collection_errors, *(failure.message for failure in recorded.failures.values())]
        first = f"; the first failure: {reasons[0].splitlines()[0][:120]}" if reasons else ""
        raise PackageError(f"{bench.label}: {len(stable)} of {num_run} tests pass quickly and twice{first}")
    return _suite(stable, list(recorded.outcomes), recorded.lines)


def _tops(layout: Layout) -> list[str]:
    prefix = "" if layout.source_root == "." else f"{layout.source_root}/"
    singles = {path for path in layout.sources if path.removeprefix(prefix).count("/") == 0}
    return [
        path if (path := f"{prefix}{module}.py") in singles else f"{prefix}{module}"
        for module in layout.modules
    ]


def _refuse(label: str, reply: SuiteReply) -> None:
    if reply.refused:
        raise PackageError(f"{label}: {reply.refused}")
    if reply.timed_out or reply.died:
        raise PackageError(f"{label}: its test suite {'hangs' if reply.timed_out else 'dies'}")
    if not reply.outcomes:
        first = f": {reply.collection_errors[0].splitlines()[0][:160]}" if reply.collection_errors else ""
        raise PackageError(f"{label}: no test in its source archive can be run{first}")


def _suite(
    stable: Sequence[str], order: Sequence[str], lines: Mapping[str, Mapping[str, Sequence[int]]]
) -> Suite:
    wanted = set(stable)
    breadth = dict.fromkeys(stable, 0)
    by_path: dict[str, dict[int, tuple[str, ...]]] = {}
    for path, by_line in lines.items():
        for line, indices in by_line.items():
            names = tuple(name for name in (order[index] for index in indices) if name in wanted)
            if names:
                by_path.setdefault(path, {})[int(line)] = names
            for name in names:
                breadth[name] += 1
    return Suite(stable=tuple(stable), lines=by_path, breadth=breadth)


def prove(
    bench: Bench, runner: Runner, *, changed: Mapping[str, bytes], tests: Sequence[str], seed: str
) -> tuple[SuiteReply, SuiteReply | None]:
    """Run `tests` on the buggy tree, and those that fail on the clean one; see `judge`."""
    chosen = {"files": sorted({name.partition("::")[0] for name in tests}), "tests": list(tests)}
    buggy = runner.submit(bench.run(changed=changed, shuffle=seed, **chosen)).result()
    if reason_to_drop(buggy):
        return buggy, None
    failed = buggy.of("failed")
    chosen = {"files": sorted({name.partition("::")[0] for name in failed}), "tests": failed}
    return buggy, runner.submit(bench.run(shuffle=f"{seed} clean", **chosen)).result()


def reason_to_drop(reply: SuiteReply) -> str:
    """Return why a buggy tree's run makes no bug, or nothing."""
    errors = {failure.error for failure in reply.failures.values()}
    reasons: Iterable[tuple[str, object]] = (
        ("hangs", reply.timed_out),
        ("dies", reply.died or "MemoryError" in errors),
        ("breaks_collection", reply.collection_errors or reply.refused),
        ("survives", not reply.of("failed")),
    )
    return next((name for name, holds in reasons if holds), "")


def judge(buggy: SuiteReply, clean: SuiteReply | None) -> Verdict:
    """Return the verdict on a bug from its two runs."""
    if clean is None:
        return Verdict(dropped=reason_to_drop(buggy), run_s=buggy.run_s)
    run_s = buggy.run_s + clean.run_s
    fixed = {name for name in clean.of("passed") if name in buggy.failures}
    if not fixed:
        return Verdict(dropped="unstable", run_s=run_s)
    return Verdict(
        fail_to_pass={name: buggy.failures[name] for name in sorted(fixed)},
        pass_to_pass=tuple(buggy.of("passed")),
        run_s=run_s,
    )
