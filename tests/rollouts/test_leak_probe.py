"""The probe against sandboxes that leak in each way, and the check of whole tasks."""

import json
import os
from pathlib import Path

import pytest
from tests.rollouts.rig import write_task

from pilotage.cli import main
from pilotage.ops.task_check import check_tasks
from pilotage.rollouts.host_environment import HostEnvironment
from pilotage.rollouts.leak_probe import probe_script
from pilotage.rollouts.sandbox import package_directories
from pilotage.rollouts.trial import EnvironmentChoice
from pilotage.types import Task

pytestmark = pytest.mark.agents

ORACLE = """#!/bin/bash
if [ -f /logs/agent/locations.json ]; then echo 2; else echo 0; fi > /logs/verifier/reward.txt
"""


class LeakyEnvironment(HostEnvironment):
    """A sandbox in which somebody was careless."""

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        for command in (
            "mkdir .git && touch pkg/mod.py.orig && mkdir pkg/__pycache__ && touch pkg/__pycache__/mod.pyc",
            "touch -d '2001-01-01' pkg/mod.py",
            "touch /tests/gold.json",
            "mkdir -p /opt/lib/pkg /opt/other/pkg",
            "cp pkg/mod.py /opt/lib/pkg && echo x > /opt/other/pkg/mod.py",
        ):
            assert (await self.exec(command)).return_code == 0


async def findings(task: Task, tmp_path: Path, environment: type[HostEnvironment]) -> tuple[str, ...]:
    choice = EnvironmentChoice(name=f"{environment.__module__}:{environment.__name__}")
    [found] = await check_tasks(
        [task], environment=choice, trials=tmp_path / "trials", concurrency=1, on_task=lambda _: None
    )
    assert not list((tmp_path / "trials").glob("*"))
    return found.findings


def with_gold(task: Task, *, files: list[str], modules: list[str], functions: list[str]) -> Task:
    gold = {"files": files, "modules": modules, "functions": functions, "empty": "zero"}
    (task.path / "tests" / "gold.json").write_text(json.dumps(gold))
    return task


async def test_a_good_task_has_no_findings(tmp_path: Path) -> None:
    task = write_task(tmp_path, test_sh=ORACLE)
    task = with_gold(task, files=["pkg/mod.py"], modules=["pkg/mod.py:gamma"], functions=[])
    assert await findings(task, tmp_path, HostEnvironment) == ()


async def test_every_way_to_give_the_answer_away_is_found(tmp_path: Path) -> None:
    task = write_task(tmp_path, test_sh=ORACLE)
    task = with_gold(task, files=["pkg/mod.py"], modules=["pkg/mod.py:gamma"], functions=[])
    found = await findings(task, tmp_path, LeakyEnvironment)
    assert {line for line in found if not line.startswith("times: ")} == {
        "history: /workspace/.git",
        "patch debris: ./pkg/mod.py.orig",
        "bytecode: ./pkg/__pycache__/mod.pyc",
        "verifier: /tests/gold.json",
        "installed copy: /opt/lib/pkg/mod.py",
    }
    assert any(line.startswith("times: files of ") for line in found)


@pytest.mark.parametrize(
    ("test_sh", "functions", "expected"),
    [
        (ORACLE, ["pkg/mod.py:gamma"], "the oracle gets 2, and 3 can be had"),
        ("#!/bin/bash\necho 2 > /logs/verifier/reward.txt\n", [], "doing nothing gets 2"),
        ("#!/bin/bash\ntrue\n", [], "the oracle has no reward: "),
    ],
)
async def test_a_verifier_that_is_wrong_is_found(
    tmp_path: Path, test_sh: str, functions: list[str], expected: str
) -> None:
    task = write_task(tmp_path, test_sh=test_sh)
    task = with_gold(task, files=["pkg/mod.py"], modules=["pkg/mod.py:gamma"], functions=functions)
    found = await findings(task, tmp_path, HostEnvironment)
    assert found[0].startswith(expected)


def test_the_command_names_tasks_with_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "set", "good", test_sh=ORACLE)
    bad = write_task(tmp_path / "set", "bad", test_sh=ORACLE)
    (bad.path / "instruction.md").write_text("")
    good, both = str(tmp_path / "set" / "good"), str(tmp_path / "set")

    (tmp_path / "set" / "good" / "tests" / "gold.json").unlink()
    assert main(["data", "check", good]) == 0
    assert "1 tasks checked, 0 with findings" in capsys.readouterr().out
    assert main(["data", "check", both]) == 1
    said = capsys.readouterr().out
    assert "set/bad: instruction.md is blank" in said
    assert "2 tasks checked, 1 with findings" in said


def test_paths_of_gold_files_are_quoted() -> None:
    assert "copies 'a/b c/$(x).py' 'b c/$(x).py'\n" in probe_script(["a/b c/$(x).py"])


def test_published_packages_are_hidden_wherever_they_are(tmp_path: Path) -> None:
    for path in (
        "lib/python3/dist-packages/a",
        "lib/sdk/x/third_party/b",
        "lib/sdk/engine/c",
        "lib/mine",
        "share/n/_vendor",
        "lib/node_modules/npm/gyp/pylib",
    ):
        os.makedirs(tmp_path / path)
    roots = {tmp_path, tmp_path / "lib", tmp_path / "share"}
    assert package_directories(roots) == [
        str(tmp_path / "lib/node_modules/npm/gyp/pylib"),
        str(tmp_path / "lib/python3/dist-packages"),
        str(tmp_path / "lib/sdk"),
        str(tmp_path / "share/n"),
    ]
