"""Repair tasks: the oracle mends the package, and the package's own tests say so in a real trial."""

import json
from pathlib import Path

import pytest
from tests.datasets.factory.toy import FILES, SOURCES, add_to_index, archive

from pilotage.cli import main
from pilotage.datasets import load_tasks
from pilotage.datasets.factory.records import unified_patch
from pilotage.datasets.repair_tasks import write_repair_tasks
from pilotage.errors import ConfigError
from pilotage.ops.task_check import check_tasks
from pilotage.rollouts.trial import EnvironmentChoice

pytestmark = pytest.mark.agents

WORDS = "toybox/words.py"
BUGGY = FILES[WORDS].replace(b"size - 3", b"size - 2")
FAILING = "tests/test_toybox.py::TestWords::test_shorten"
PASSING = "tests/test_toybox.py::TestWords::test_first"


@pytest.fixture
def bugs(tmp_path: Path) -> Path:
    """What the factory would have written of one bug."""
    index = tmp_path / "index"
    add_to_index(index, "toybox", "1.0", archive(FILES))
    [line] = [
        line for line in (index / "toybox" / "index.html").read_text().splitlines() if ".tar.gz" in line
    ]
    digest = line.partition("sha256=")[2].partition('"')[0]
    bugs = tmp_path / "bugs"
    bugs.mkdir()
    shared = {"package": "toybox", "version": "1.0", "sdist_sha256": digest}
    visible = sorted([*SOURCES, "LICENSE"])
    package = shared | {"source_root": ".", "visible": visible, "stable_tests": [PASSING, FAILING]}
    bug = shared | {
        "name": "toybox-0000",
        "kinds": ["off_by_one"],
        "patch": unified_patch(FILES, {WORDS: BUGGY}),
        "fail_to_pass": [FAILING],
        "pass_to_pass": [],
        "issue": "shortened texts are too long",
    }
    (bugs / "packages.jsonl").write_text(json.dumps(package) + "\n")
    (bugs / "bugs.jsonl").write_text(json.dumps(bug) + "\n")
    return bugs


def write(bugs: Path) -> Path:
    out = bugs.parent / "repairs"
    index = (bugs.parent / "index").as_uri()
    assert write_repair_tasks(bugs, out, index_url=index, cache=bugs.parent / "cache") == 1
    return out / "toybox-0000-repair"


def test_the_agent_gets_the_buggy_package_and_the_verifier_the_tests(bugs: Path) -> None:
    task = write(bugs)
    seen = {path.relative_to(task / "environment").as_posix() for path in (task / "environment").rglob("*.*")}
    assert seen == {*SOURCES}
    assert (task / "environment" / WORDS).read_bytes() == BUGGY
    assert (task / "tests" / "selected.txt").read_text().splitlines() == [PASSING, FAILING]
    assert (task / "tests" / "tree" / "tests" / "test_toybox.py").is_file()
    assert (task / "solution" / "files" / WORDS).read_bytes() == FILES[WORDS]
    assert "shortened texts are too long" in (task / "instruction.md").read_text()
    assert write(bugs) == task  # a second time changes nothing


async def test_the_oracle_earns_1_and_doing_nothing_0(bugs: Path, tmp_path: Path) -> None:
    tasks = load_tasks([write(bugs)])
    [found] = await check_tasks(
        tasks,
        environment=EnvironmentChoice(),
        trials=tmp_path / "trials",
        concurrency=1,
        on_task=lambda _: None,
    )
    assert found.findings == ()


def test_what_is_no_directory_of_bugs_is_refused(
    bugs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = str(tmp_path / "out")
    assert main(["data", "make-repairs", str(tmp_path), "--out", out]) == 2
    missing = tmp_path / "packages.jsonl"
    advice = "give a directory that `pilotage data make-bugs` wrote"
    assert capsys.readouterr().err == f"pilotage: {missing} is missing; {advice}\n"
    assert main(["data", "make-repairs", str(bugs), "--out", out]) == 0
    assert capsys.readouterr().out == f"1 repair tasks in {out}\n"


def test_another_archive_than_the_bugs_were_made_of_is_refused(bugs: Path) -> None:
    record = json.loads((bugs / "packages.jsonl").read_text())
    (bugs / "packages.jsonl").write_text(json.dumps(record | {"sdist_sha256": "00"}))
    with pytest.raises(ConfigError, match=r"toybox==1\.0: the index has another archive"):
        write(bugs)
