"""The whole factory on a toy package: what it writes, that it goes on after a kill, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.datasets.factory.toy import FILES, SOURCES, add_to_index, archive

from pilotage.cli import main
from pilotage.datasets import load_tasks
from pilotage.datasets.factory import Factory, Made, make_bugs
from pilotage.datasets.localization_tasks import issue_of
from pilotage.errors import ConfigError

NUM_TASKS = 8


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counts: dict[str, tuple[int, int]] = {}

    def on_progress(self, package: str, found: int, wanted: int) -> None:
        self.counts[package] = (found, wanted)

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("index")
    add_to_index(root, "toybox", "1.0", archive(FILES))
    add_to_index(root, "untested", "1.0", archive({path: FILES[path] for path in SOURCES}))
    return root


def factory(index: Path, out: Path, *, workers: int = 1, seed: int = 0, tasks: int = NUM_TASKS) -> Factory:
    return Factory(
        packages=["toybox==1.0"],
        out=out,
        num_tasks=tasks,
        seed=seed,
        num_workers=workers,
        index_url=index.as_uri(),
        cache=index.parent / "cache",
    )


def make(wanted: Factory, observer: Notes | None = None) -> Made:
    return make_bugs(wanted, observer or Notes(), threading.Event())


@pytest.fixture(scope="module")
def out(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "tasks"
    made = make(factory(index, out))
    assert (made.num_tasks, made.num_multi_place, made.failures) == (NUM_TASKS, 3, {})
    return out


def files_of(directory: Path) -> dict[str, bytes]:
    """All files but the memory of the run, whose order is that of the machine."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and ".factory" not in path.parts and path.name != "yield.md"
    }


def records_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "bugs.jsonl").read_text().splitlines()]


def run_tests(tree: Path, tests: list[str]) -> set[str]:
    """Run tests with pytest itself, in its own process; returns the ids that fail."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "--rootdir=.", *tests],
        cwd=tree,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return {line.removeprefix("FAILED ").split(" - ")[0] for line in lines}


def write(tree: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    return tree


def test_tasks_are_tasks_and_a_third_is_of_several_places(out: Path) -> None:
    assert [task.id for task in load_tasks([out])] == [f"tasks/toybox-{n:04d}" for n in range(NUM_TASKS)]
    records = records_of(out)
    assert [record["name"] for record in records] == [f"toybox-{n:04d}" for n in range(NUM_TASKS)]
    several = [record for record in records if record["num_places"] != 1]
    assert len(several) * 3 >= NUM_TASKS
    for record in several:
        assert len(set(record["places"])) == record["num_places"]  # pyright: ignore[reportArgumentType]


def test_a_patch_breaks_what_it_says_and_its_reverse_mends_it(out: Path, tmp_path: Path) -> None:
    record = next(record for record in records_of(out) if record["num_places"] != 1)
    tree = write(tmp_path / "tree", FILES)
    fail, others = record["fail_to_pass"], record["pass_to_pass"]
    assert isinstance(fail, list)
    assert isinstance(others, list)
    patch = str(record["patch"]).encode()
    subprocess.run(["git", "apply", "-"], cwd=tree, input=patch, check=True)
    assert run_tests(tree, [*fail, *others]) == set(fail)
    subprocess.run(["git", "apply", "-R", "-"], cwd=tree, input=patch, check=True)
    assert run_tests(tree, fail) == set()
    assert {path: (tree / path).read_bytes() for path in SOURCES} == {p: FILES[p] for p in SOURCES}


def test_the_agent_sees_the_buggy_package_alone(out: Path) -> None:
    for record in records_of(out):
        task = out / str(record["name"])
        tree = files_of(task / "environment")
        assert set(tree) == {"Dockerfile", "LICENSE", *SOURCES}
        gold = json.loads((task / "tests" / "gold.json").read_bytes())
        assert gold["files"] == [path for path in SOURCES if tree[path] != FILES[path]]
        assert gold["empty"] == "match"
        assert list(task.rglob("*.pyc")) == []


def test_the_issue_names_no_test_and_no_gold_file(out: Path) -> None:
    for record in records_of(out):
        text = issue_of((out / str(record["name"]) / "instruction.md").read_text())
        assert text == str(record["issue"]).strip()
        assert "test_" not in text
        gold = record["gold"]
        assert isinstance(gold, dict)
        for path in gold["files"]:
            assert path not in text
            assert path.removesuffix(".py").replace("/", ".") not in text


def test_metadata_tell_what_the_records_tell(out: Path) -> None:
    for record in records_of(out):
        settings = tomllib.loads((out / str(record["name"]) / "task.toml").read_text())
        metadata = settings["metadata"]
        for key in ("package", "version", "kinds", "num_places", "fail_to_pass", "seed"):
            assert metadata[key] == record[key]
        leaked = record["leaks"]
        assert leaked == {key: metadata[f"leaks_{key}"] for key in ("function", "module", "file")}


def test_the_packages_record_tells_how_tests_are_run(out: Path) -> None:
    (record,) = [json.loads(line) for line in (out / "packages.jsonl").read_text().splitlines()]
    assert (record["source_root"], len(record["stable_tests"])) == (".", 8)
    assert record["sdist_sha256"] == records_of(out)[0]["sdist_sha256"]


def test_the_same_arguments_give_the_same_bytes_with_more_workers(
    index: Path, out: Path, tmp_path: Path
) -> None:
    make(factory(index, tmp_path / "tasks", workers=3))
    assert files_of(tmp_path / "tasks") == files_of(out)


def test_a_killed_run_goes_on_to_the_same_bytes(index: Path, out: Path, tmp_path: Path) -> None:
    target = tmp_path / "tasks"
    program = (
        "import sys, threading; from pathlib import Path\n"
        "from tests.datasets.factory.test_factory_making import Notes, factory, make\n"
        "make(factory(Path(sys.argv[1]), Path(sys.argv[2])))\n"
    )
    journal = target / ".factory" / "toybox==1.0.jsonl"
    killed = subprocess.Popen([sys.executable, "-c", program, index, target], start_new_session=True)
    while killed.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with journal.open("ab") as file:
        file.write(b'{"key": "torn')
    assert not (target / "bugs.jsonl").exists()
    make(factory(index, target))
    assert files_of(target) == files_of(out)


def test_a_finished_run_runs_nothing_again(index: Path, out: Path) -> None:
    before = (out / ".factory" / "toybox==1.0.jsonl").read_bytes()
    notes = Notes()
    assert make(factory(index, out), notes).num_tasks == NUM_TASKS
    assert (out / ".factory" / "toybox==1.0.jsonl").read_bytes() == before
    assert notes.counts == {"toybox==1.0": (NUM_TASKS, NUM_TASKS)}


def test_a_bare_issue_is_the_issue_that_a_general_agent_is_told(
    index: Path, out: Path, tmp_path: Path
) -> None:
    make(replace(factory(index, tmp_path / "bare"), bare_issue=True))
    for framed in out.glob("*/instruction.md"):
        text, bare = framed.read_text(), (tmp_path / "bare" / framed.parent.name / framed.name).read_text()
        assert issue_of(text) == bare.strip()
        assert "localization_finish" in text
        assert "localization_finish" not in bare


def test_another_seed_gives_other_bugs(index: Path, out: Path, tmp_path: Path) -> None:
    make(factory(index, tmp_path / "tasks", seed=1, tasks=3))
    patches = {str(record["patch"]) for record in records_of(tmp_path / "tasks")}
    assert not patches <= {str(record["patch"]) for record in records_of(out)}


@pytest.mark.parametrize(("change", "named"), [({"seed": 1}, "seed"), ({"tasks": 9}, "tasks")])
def test_other_arguments_need_another_directory(
    index: Path, out: Path, change: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"was made with other arguments \({named}\)"):
        make(factory(index, out, **change))  # pyright: ignore[reportArgumentType]


def test_a_directory_of_somebody_else_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match="exists and is not the factory's"):
        make(factory(index, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_wrong_packages_are_told_one_line_each_and_the_others_go_on(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages = ["toybox==1.0", "nothing==1.0", "untested==1.0", "toybox-none==9.0"]
    out = str(tmp_path / "tasks")
    assert main(["data", "make-bugs", *packages, "--out", out, "--tasks", "16", "--workers", "1"]) == 0
    printed = capsys.readouterr()
    assert sorted(printed.err.splitlines()) == [
        "nothing==1.0: the index has no such package",
        "toybox-none==9.0: the index has no such package",
        "toybox==1.0: 4 tasks from 8 stable tests",
        "untested==1.0: no test in its source archive can be run",
    ]
    assert printed.out.splitlines()[-1].startswith(f"4 tasks in {out}: 1 of several places, ")
    assert printed.out.splitlines()[-1].endswith("; 3 packages gave none")
    assert "| toybox==1.0 |" in printed.out


def test_nothing_made_is_exit_code_1(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["data", "make-bugs", "untested==1.0", "--out", str(tmp_path / "tasks")]) == 1
    assert capsys.readouterr().out.startswith("0 tasks in ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["toybox"], "'toybox' is no PACKAGE==VERSION"),
        (["a==1", "A==2"], "A is there twice; one version of a package is enough"),
        (["a==1", "--workers", "0"], "the number of workers must be positive, got 0"),
        (["a==1", "b==1", "--tasks", "1"], "1 tasks are fewer than 2 packages"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    assert main(["data", "make-bugs", *argv, "--out", str(tmp_path / "tasks")]) == 2
    assert capsys.readouterr().err == f"pilotage: {message}\n"
    assert not (tmp_path / "tasks").exists()


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['libcst'] = None; from pilotage.cli import main\n"
        f"sys.exit(main(['data', 'make-bugs', 'a==1', '--out', {str(tmp_path / 'out')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("; install it with `pip install 'pilotage[factory]'` or `make install`")


def test_an_interrupted_command_ends_soon_and_says_so(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks"
    command = [sys.executable, "-m", "pilotage", "data", "make-bugs", "toybox==1.0", "--out", str(out)]
    running = subprocess.Popen(
        command,
        env={**os.environ, "PIP_INDEX_URL": index.as_uri(), "XDG_CACHE_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and so would what these tests start in one.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not (out / ".factory" / "toybox==1.0.suite").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "pilotage: interrupted"
    assert not (out / ".factory" / "scratch").exists()
