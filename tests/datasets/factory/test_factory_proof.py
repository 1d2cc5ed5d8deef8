"""Runs of tests, whatever the program under test does, and what they prove."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.datasets.factory.toy import FILES

from pilotage.datasets.factory.proof import Bench, Suite, find_suite, judge, prove, set_up
from pilotage.datasets.factory.suites import FactoryStoppedError, SuitePool
from pilotage.datasets.factory.trees import find_layout, is_test
from pilotage.errors import PackageError


@pytest.fixture(scope="module")
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, stop: threading.Event) -> Iterator[SuitePool]:
    scratch = tmp_path_factory.mktemp("scratch")
    with SuitePool(1, scratch=scratch, stop=stop) as pool:
        yield pool
    assert list(scratch.iterdir()) == []


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return set_up("toybox", find_layout("toybox", FILES), FILES, tmp_path_factory.mktemp("toy") / "tree")


@pytest.fixture(scope="module")
def suite(bench: Bench, pool: SuitePool) -> Suite:
    return find_suite(bench, pool, seed=0)


def edited(path: str, old: str, new: str) -> dict[str, bytes]:
    content = FILES[path].decode()
    assert old in content
    return {path: content.replace(old, new).encode()}


def proven(bench: Bench, pool: SuitePool, suite: Suite, changed: Mapping[str, bytes]) -> object:
    return judge(*prove(bench, pool, changed=changed, tests=suite.stable, seed="0"))


def test_the_layout_tells_sources_from_tests() -> None:
    layout = find_layout("toybox", FILES)
    assert (layout.source_root, layout.modules) == (".", ("toybox",))
    assert layout.sources == ("toybox/__init__.py", "toybox/counts.py", "toybox/words.py")
    assert layout.visible == ("LICENSE", *layout.sources)  # no tests, no PKG-INFO


def test_the_layout_knows_a_directory_of_sources_and_tests_inside_the_package() -> None:
    paths = [
        "src/a/__init__.py",
        "src/a/data.txt",
        "src/a/tests/test_x.py",
        "src/b.py",
        "setup.py",
        "docs/conf.py",
    ]
    layout = find_layout("a", paths)
    assert (layout.source_root, layout.modules) == ("src", ("a", "b"))
    assert layout.sources == ("src/a/__init__.py", "src/b.py")
    assert layout.visible == ("src/a/__init__.py", "src/a/data.txt", "src/b.py")
    with pytest.raises(PackageError, match="holds no Python package"):
        find_layout("a", ["setup.py", "tests/__init__.py", "README"])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/testing.py", False),
        ("a/test.py", False),
        ("test_a.py", True),
        ("a/conftest.py", True),
        ("test/data.json", True),
    ],
)
def test_a_test_is_known_by_its_name(path: str, expected: bool) -> None:
    assert is_test(path) == expected


def test_stable_tests_are_found_with_the_lines_that_they_pass(suite: Suite) -> None:
    assert len(suite.stable) == 8
    returns = suite.witnesses("toybox/words.py", 7, 7)  # `return "".join(words)`: only "a" is that short
    assert returns == ["tests/test_toybox.py::TestWords::test_join[a-a]"]
    assert suite.witnesses("toybox/counts.py", 17, 17) == ["tests/test_toybox.py::test_a_counter_has_a_limit"]
    assert suite.witnesses("toybox/counts.py", 1000, 1001) == []


def test_a_bug_breaks_tests_that_pass_on_the_clean_tree(bench: Bench, pool: SuitePool, suite: Suite) -> None:
    changed = edited("toybox/words.py", "size - 3", "size - 2")
    buggy, clean = prove(bench, pool, changed=changed, tests=suite.stable, seed="0")
    verdict = judge(buggy, clean)
    assert verdict.dropped == ""
    (name,) = verdict.fail_to_pass
    assert name == "tests/test_toybox.py::TestWords::test_shorten"
    assert verdict.pass_to_pass == tuple(sorted(set(suite.stable) - {name}))
    failure = verdict.fail_to_pass[name]
    assert (failure.error, failure.line) == ("AssertionError", 34)
    assert "abcdef..." in failure.message
    assert clean is not None
    assert clean.of("passed") == [name]  # and in reverse: the clean tree is what fixes it


def test_what_is_no_bug_survives(bench: Bench, pool: SuitePool, suite: Suite) -> None:
    changed = edited("toybox/words.py", "default=None", "default=0")
    assert judge(*prove(bench, pool, changed=changed, tests=suite.stable, seed="0")).dropped == "survives"


HOSTILE = {
    "loops": ("    while True: pass\n", "hangs"),
    "loops and catches all": ("    while True:\n        try: 1 / 0\n        except: pass\n", "hangs"),
    "exits": ("    import os; os._exit(0)\n", "dies"),
    "kills itself": ("    import os; os.kill(os.getpid(), 9)\n", "dies"),
    "takes memory": ("    return [bytes(1 << 30) for _ in range(99)]\n", "dies"),
    "is no module": ("    return (\n", "breaks_collection"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_program_is_dropped_and_the_next_run_is_well(
    bench: Bench, pool: SuitePool, suite: Suite, case: str
) -> None:
    body, reason = HOSTILE[case]
    changed = edited("toybox/words.py", "    if len(text) <= size:\n", f"{body}    if len(text) <= size:\n")
    assert judge(*prove(bench, pool, changed=changed, tests=suite.stable, seed="0")).dropped == reason
    assert pool.submit(bench.run()).result().of("passed") == list(suite.stable)


def test_processes_of_a_run_end_with_it(bench: Bench, pool: SuitePool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"""    import os, time
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            with open({str(pids)!r}, "a") as file: file.write(f"{{os.getpid()}}\\n")
            time.sleep(1000)
"""
    changed = edited("toybox/words.py", "    if len(text) <= size:\n", f"{body}    if len(text) <= size:\n")
    (name,) = [name for name in pool.submit(bench.run()).result().outcomes if "shorten" in name]
    pool.submit(bench.run(changed=changed, tests=[name])).result()
    written = pids.read_text().split()
    assert written
    assert [pid for pid in written if Path("/proc", pid).exists()] == []


def test_a_run_sees_no_environment_of_ours_and_no_installed_copy(bench: Bench, pool: SuitePool) -> None:
    os.environ["PILOTAGE_SECRET_OF_A_TEST"] = "x"
    test = (
        "import os, toybox\n"
        "def test_it():\n"
        "    assert 'PILOTAGE_SECRET_OF_A_TEST' not in os.environ\n"
        "    assert toybox.__file__.startswith(os.getcwd())\n"
        "    assert os.environ['HOME'] != '/root'\n"
    )
    try:
        changed = {"tests/test_toybox.py": test.encode()}
        reply = pool.submit(bench.run(changed=changed)).result()
    finally:
        del os.environ["PILOTAGE_SECRET_OF_A_TEST"]
    assert reply.of("passed") == ["tests/test_toybox.py::test_it"], reply.failures


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("", "toybox: no test in its source archive can be run"),
        ("import nothing_like_it\n", "toybox: no test in its source archive can be run: "),
        (
            "def test_a(): assert 0, 'no'\n",
            "toybox: 0 of 1 tests pass quickly and twice; the first failure: ",
        ),
        ("import os\nos._exit(1)\n", "toybox: its test suite dies"),
    ],
)
def test_a_package_without_a_suite_that_passes_is_refused(
    pool: SuitePool, tmp_path: Path, test: str, message: str
) -> None:
    files = {**FILES, "tests/test_toybox.py": test.encode()}
    bench = set_up("toybox", find_layout("toybox", files), files, tmp_path / "tree")
    with pytest.raises(PackageError) as caught:
        find_suite(bench, pool, seed=0)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_module_that_pytest_uses_itself_is_refused(pool: SuitePool, tmp_path: Path) -> None:
    files = {"pluggy/__init__.py": b"", "tests/test_a.py": b"def test_a(): pass\n"}
    bench = set_up("pluggy", find_layout("pluggy", files), files, tmp_path / "tree")
    with pytest.raises(PackageError, match="pluggy: pytest itself uses pluggy"):
        find_suite(bench, pool, seed=0)


def test_a_stopped_pool_gives_up_what_runs(bench: Bench, tmp_path: Path) -> None:
    stop = threading.Event()
    line = "    if len(text) <= size:\n"
    changed = edited("toybox/words.py", line, f"    import time; time.sleep(100)\n{line}")
    with SuitePool(1, scratch=tmp_path, stop=stop) as pool:
        running = pool.submit(bench.run(changed=changed))
        began = time.monotonic()
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(FactoryStoppedError):
            running.result()
        assert time.monotonic() - began < 10
        with pytest.raises(FactoryStoppedError):
            pool.submit(bench.run()).result()
