"""Make tasks of several packages in one directory.

    OUT/PACKAGE-NNNN/   localization tasks
    OUT/bugs.jsonl      a record for each bug: patch, tests, gold, issue
    OUT/packages.jsonl  a record for each package: how its tests are run
    OUT/yield.md        the table
    OUT/.factory/       verdicts, to go on from; may be removed when all is done

The same arguments give the same tasks, whatever the number of workers and however often the run was killed;
a test near its limit of time or memory is the one exception, since its verdict depends on the machine.
"""

import fcntl
import re
import shutil
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import orjson

from pilotage.datasets.factory.journal import Journal, digest
from pilotage.datasets.factory.package_bugs import PackageBugs, Workshop, Yield, find_bugs
from pilotage.datasets.factory.proof import find_suite, set_up
from pilotage.datasets.factory.records import package_record, record_of, task_of
from pilotage.datasets.factory.suites import SuitePool
from pilotage.datasets.factory.trees import find_layout
from pilotage.datasets.factory.yields import summed, yield_table
from pilotage.datasets.localization_tasks import write_localization_task
from pilotage.datasets.sdists import fetch_sdist
from pilotage.errors import ConfigError, PackageError
from pilotage.files import write_atomically

VERSION = 1
"""Of modifiers, order and text: raised when the same arguments no longer give the same tasks."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


class FactoryObserver(Protocol):
    """Is told how it goes, from several threads."""

    def on_progress(self, package: str, found: int, wanted: int) -> None:
        """A package has so many bugs of those wanted."""
        ...

    def say(self, text: str) -> None:
        """One line for a person."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """What to make, and with what."""

    packages: Sequence[str]
    """Each as NAME==VERSION; all different."""
    out: Path
    num_tasks: int
    """In all, spread evenly over the packages."""
    seed: int
    num_workers: int
    index_url: str
    cache: Path
    """Of sdists."""
    bare_issue: bool = False
    """Whether the instruction is the issue alone, for a policy that is told by its prompt how to hand in."""

    def __post_init__(self) -> None:
        """Check everything that can be checked before anything is fetched.

        Raises:
            ConfigError: a package is not NAME==VERSION or is there twice, or a number is out of range.
        """
        if self.num_workers < 1:
            raise ConfigError(f"the number of workers must be positive, got {self.num_workers}")
        if self.num_tasks < len(self.packages):
            raise ConfigError(f"{self.num_tasks} tasks are fewer than {len(self.packages)} packages")
        names: set[str] = set()
        for package in self.packages:
            found = _REQUIREMENT.fullmatch(package)
            if found is None:
                raise ConfigError(f"{package!r} is no PACKAGE==VERSION")
            if found.group(1).lower() in names:
                raise ConfigError(f"{found.group(1)} is there twice; one version of a package is enough")
            names.add(found.group(1).lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of it."""

    num_tasks: int
    num_multi_place: int
    num_name_errors: int
    failures: Mapping[str, str]
    """Package -> why nothing was made of it."""
    table: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackageResult:
    package: str
    bugs: PackageBugs = field(default_factory=lambda: PackageBugs(bugs=(), yields={}, drops={}))
    records: tuple[bytes, ...] = ()
    shared: bytes = b""
    failure: str = ""


def make_bugs(factory: Factory, observer: FactoryObserver, stop: threading.Event) -> Made:
    """Make the tasks, or go on making them; a package that fails is told and the others go on.

    Args:
        stop: another thread sets it to end the run soon; the same arguments go on from there.

    Raises:
        FactoryStoppedError: `stop` was set.
        ConfigError: `out` holds something else, or somebody else is at work there.
    """
    state = factory.out / ".factory"
    _claim(factory, state)
    with _locked(state / "lock"):
        scratch = state / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with SuitePool(factory.num_workers, scratch=scratch, stop=stop) as pool:
                results = _all_packages(factory, state, pool, observer, stop)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return _finish(factory.out, results)


def _claim(factory: Factory, state: Path) -> None:
    settings = state / "settings.json"
    wanted = {
        "factory": VERSION,
        "packages": sorted(factory.packages),
        "tasks": factory.num_tasks,
        "seed": factory.seed,
        "bare_issue": factory.bare_issue,
    }
    if settings.is_file():
        found = orjson.loads(settings.read_bytes())
        different = [key for key in wanted if found.get(key, False) != wanted[key]]
        if different:
            raise ConfigError(
                f"{factory.out} was made with other arguments ({', '.join(different)}); choose another --out"
            )
        return
    if factory.out.exists() and any(path != state for path in factory.out.iterdir()):
        raise ConfigError(f"{factory.out} exists and is not the factory's; choose another --out")
    state.mkdir(parents=True, exist_ok=True)
    write_atomically(settings, orjson.dumps(wanted))


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path.parent.parent}: another process makes bugs there") from None
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floor:
    """What all packages are made with."""

    factory: Factory
    state: Path
    pool: SuitePool
    threads: ThreadPoolExecutor
    observer: FactoryObserver

    @property
    def lookahead(self) -> int:
        """Proofs of one package that are under way at once: one more than workers, so that none waits."""
        return self.factory.num_workers + 1


def _all_packages(
    factory: Factory, state: Path, pool: SuitePool, observer: FactoryObserver, stop: threading.Event
) -> list[_PackageResult]:
    packages = sorted(factory.packages)
    share, rest = divmod(factory.num_tasks, len(packages))
    wanted = {package: share + (number < rest) for number, package in enumerate(packages)}
    for package in packages:
        observer.on_progress(package, 0, wanted[package])
    # One package more than workers, so that no worker waits where a package is fetched or parsed.
    num_at_once = factory.num_workers + 1
    with (
        ThreadPoolExecutor(num_at_once, thread_name_prefix="package") as coordinators,
        ThreadPoolExecutor(num_at_once * num_at_once, thread_name_prefix="proof") as threads,
    ):
        floor = _Floor(factory=factory, state=state, pool=pool, threads=threads, observer=observer)
        futures = [coordinators.submit(_one_package, floor, package, wanted[package]) for package in packages]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()  # the others are not to finish what nobody will read
            raise


def _one_package(floor: _Floor, package: str, wanted: int) -> _PackageResult:
    observer = floor.observer
    try:
        shop = _open_shop(floor, package)
    except PackageError as error:
        observer.say(str(error))
        observer.on_progress(package, 0, 0)
        return _PackageResult(package=package, failure=str(error))
    bugs = find_bugs(shop, wanted=wanted, on_found=lambda found: observer.on_progress(package, found, wanted))
    records = tuple(_write(floor.factory, shop, number, bugs) for number in range(len(bugs.bugs)))
    observer.say(f"{package}: {len(records)} tasks from {len(shop.suite.stable)} stable tests")
    observer.on_progress(package, len(records), len(records))
    shared = package_record(shop.sdist, shop.bench.layout, shop.suite.stable)
    failure = "" if records else f"{package}: no bug was proven"
    return _PackageResult(
        package=package, bugs=bugs, records=records, shared=orjson.dumps(shared), failure=failure
    )


def _open_shop(floor: _Floor, package: str) -> Workshop:
    name, _, version = package.partition("==")
    factory = floor.factory
    sdist = fetch_sdist(name, version, index_url=factory.index_url, cache=factory.cache)
    layout = find_layout(package, sdist.files)
    bench = set_up(package, layout, sdist.files, floor.state / "scratch" / package)
    journal = Journal(floor.state, package)
    key = digest(sdist.sha256, factory.seed)
    suite = journal.suite(key)
    if suite is None:
        suite = find_suite(bench, floor.pool, seed=factory.seed)
        journal.keep_suite(key, suite)
    return Workshop(
        sdist=sdist,
        bench=bench,
        suite=suite,
        journal=journal,
        runner=floor.pool,
        seed=factory.seed,
        threads=floor.threads,
        lookahead=floor.lookahead,
    )


def _write(factory: Factory, shop: Workshop, number: int, bugs: PackageBugs) -> bytes:
    """Write a task, unless a run before has; return its record."""
    name = f"{shop.sdist.name}-{number:04d}"
    bug = bugs.bugs[number]
    if not (factory.out / name).exists():
        task = task_of(
            name, bug, shop.sdist, shop.bench.layout, seed=factory.seed, bare_issue=factory.bare_issue
        )
        write_localization_task(factory.out / name, task)
    return orjson.dumps(record_of(name, bug, shop.sdist, seed=factory.seed))


def _finish(out: Path, results: Sequence[_PackageResult]) -> Made:
    made = [result for result in results if result.records]
    bugs = [bug for result in made for bug in result.bugs.bugs]
    table = _tables(made)
    write_atomically(out / "bugs.jsonl", b"".join(line + b"\n" for r in made for line in r.records))
    write_atomically(out / "packages.jsonl", b"".join(result.shared + b"\n" for result in made))
    write_atomically(out / "yield.md", table.encode())
    return Made(
        num_tasks=len(bugs),
        num_multi_place=sum(len(bug.parts) > 1 for bug in bugs),
        num_name_errors=sum(bug.is_name_error for bug in bugs),
        failures={result.package: result.failure for result in results if result.failure},
        table=table,
    )


def _tables(results: Sequence[_PackageResult]) -> str:
    by_package = {result.package: summed(list(result.bugs.yields.values())) for result in results}
    kinds = sorted({kind for result in results for kind in result.bugs.yields})
    by_kind = {kind: summed([result.bugs.yields.get(kind, Yield()) for result in results]) for kind in kinds}
    drops: dict[str, int] = {}
    for result in results:
        for reason, number in result.bugs.drops.items():
            drops[reason] = drops.get(reason, 0) + number
    dropped = "".join(f"| {reason} | {number} |\n" for reason, number in sorted(drops.items()))
    counts = {result.package: str(len(result.records)) for result in results}
    counts["all"] = str(sum(len(result.records) for result in results))
    return (
        f"{yield_table('package', by_package, {'tasks': counts})}\n{yield_table('kind', by_kind, {})}\n"
        f"| dropped because | bugs |\n| --- | --- |\n{dropped}"
    )
