"""Localization tasks from a real installed package: what is written, what is given away, what scores."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pilotage.datasets import write_package_tasks
from pilotage.datasets.package_tasks import package_sources
from pilotage.errors import ConfigError

PACKAGE = "h11"  # small, and httpx, which Pilotage needs, brings it in
NUM_TASKS = 3


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("tasks") / "train"
    return write_package_tasks(out, packages=[PACKAGE], num_tasks=NUM_TASKS, seed=0)


@pytest.fixture(scope="module")
def clean() -> dict[str, str]:
    return package_sources(PACKAGE)


def gold_of(task: Path) -> dict[str, list[str]]:
    return json.loads((task / "tests" / "gold.json").read_bytes())


def score(task: Path, scratch: Path, *, with_solution: bool) -> dict[str, float]:
    """Run the task's own scripts, with the sandbox's absolute paths moved into `scratch`."""
    logs = scratch / "logs"
    (logs / "verifier").mkdir(parents=True)
    names = ["solution/solve.sh", "tests/test.sh"] if with_solution else ["tests/test.sh"]
    for name in names:
        script = (task / name).read_text()
        script = script.replace("/logs/", f"{logs}/").replace("/tests/", f"{task / 'tests'}/")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the sandbox has this Python first, too
        environment = os.environ | {"PATH": path}
        done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    return json.loads((logs / "verifier" / "reward.json").read_text())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(
    tasks: list[Path], tmp_path: Path
) -> None:
    written = [
        write_package_tasks(tmp_path / str(seed), packages=[PACKAGE], num_tasks=NUM_TASKS, seed=seed)
        for seed in (0, 1)
    ]
    same, other = (files_of(tmp_path / str(seed)) for seed in (0, 1))
    assert [path.name for path in written[0]] == [f"h11-{index:04d}" for index in range(NUM_TASKS)]
    assert same == files_of(tasks[0].parent)
    assert same.keys() == other.keys()
    assert all(same[f"{path.name}/instruction.md"] != other[f"{path.name}/instruction.md"] for path in tasks)


def test_a_task_has_the_files_that_harbor_reads(tasks: list[Path]) -> None:
    for task in tasks:
        settings = tomllib.loads((task / "task.toml").read_text())
        assert settings["environment"]["network_mode"] == "no-network"
        assert settings["task"]["name"] == f"pilotage/{task.name}"
        assert (task / "tests" / "test.sh").stat().st_mode & 0o111
        assert (task / "solution" / "solve.sh").stat().st_mode & 0o111


def test_one_file_holds_one_changed_function_and_gold_names_it(
    tasks: list[Path], clean: dict[str, str]
) -> None:
    for task in tasks:
        given = {path: (task / "environment" / path).read_bytes().decode() for path in clean}
        changed = [path for path in clean if given[path] != clean[path]]
        gold = gold_of(task)
        (place,) = gold["functions"]
        name = place.partition(":")[2]
        owner, _, function = name.rpartition(".")
        assert gold["files"] == changed
        assert gold["modules"] == [f"{changed[0]}:{owner or function}"]
        bodies = [
            [ast.unparse(node) for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == function]
            for text in (given[changed[0]], clean[changed[0]])
        ]
        assert bodies[0] != bodies[1]


def test_the_clean_source_is_nowhere_in_the_task(tasks: list[Path], clean: dict[str, str]) -> None:
    for task in tasks:
        (path,) = gold_of(task)["files"]
        assert (task / "environment" / path).is_file()
        for content in files_of(task).values():
            assert clean[path].encode() not in content


def test_the_agent_sees_sources_alone(tasks: list[Path], clean: dict[str, str]) -> None:
    for task in tasks:
        seen = set(files_of(task / "environment"))
        assert seen == {"Dockerfile", *clean}
        assert all(path.endswith(".py") for path in clean)
        assert not any(part.startswith(".") for path in seen for part in path.split("/"))


def test_gold_is_in_the_tests_and_the_solution_alone(tasks: list[Path], clean: dict[str, str]) -> None:
    for task in tasks:
        (place,) = gold_of(task)["functions"]
        files = files_of(task)
        holders = {name.split("/")[0] for name, content in files.items() if place.encode() in content}
        assert holders == {"tests"}  # the solution names it in parts, as a hand-in does
        (path,) = gold_of(task)["files"]
        named = {name.split("/")[0] for name, content in files.items() if path.encode() in content}
        assert named == {"tests", "solution"}


def test_the_issue_names_identifiers_of_the_function_and_no_place(tasks: list[Path]) -> None:
    for task in tasks:
        issue = (task / "instruction.md").read_text()
        (place,) = gold_of(task)["functions"]
        path, _, name = place.partition(":")
        parts = {part.lower() for part in re.split(r"[/.]", path) + name.split(".")}
        assert not parts & {word.lower() for word in re.findall(r"\w+", issue)}
        clues = re.findall(r"`(\w+)`", issue)
        assert len(set(clues)) == 3
        source = (task / "environment" / path).read_text()
        functions = [
            ast.get_source_segment(source, node) or ""
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2]
        ]
        assert any(all(re.search(rf"\b{clue}\b", text) for clue in clues) for text in functions)


def test_the_oracle_scores_3(tasks: list[Path], tmp_path: Path) -> None:
    for task in tasks:
        reward = score(task, tmp_path / task.name, with_solution=True)
        assert reward == {"reward": 3.0, "file_f1": 1.0, "module_f1": 1.0, "function_f1": 1.0, "no_answer": 0}


def test_no_answer_scores_0(tasks: list[Path], tmp_path: Path) -> None:
    reward = score(tasks[0], tmp_path, with_solution=False)
    assert reward == {"reward": 0.0, "file_f1": 0.0, "module_f1": 0.0, "function_f1": 0.0, "no_answer": 1}


def test_tasks_are_spread_evenly_over_the_packages(tmp_path: Path) -> None:
    written = write_package_tasks(tmp_path / "out", packages=["h11", "idna"], num_tasks=3, seed=0)
    assert [path.name for path in written] == ["h11-0000", "h11-0001", "idna-0000"]
    assert all(path.is_dir() for path in written)


def test_a_package_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^package 'no_such_package' is not installed; run `make install`$"
    ):
        write_package_tasks(tmp_path / "out", packages=["no_such_package"], num_tasks=1, seed=0)


def test_a_package_that_is_too_small_leaves_no_half_written_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^package 'h11' yields \d+ tasks, 100000 were asked for$"):
        write_package_tasks(tmp_path / "out", packages=["h11"], num_tasks=100_000, seed=0)
    assert not (tmp_path / "out").exists()


def test_no_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the number of tasks must be positive, got 0$"):
        write_package_tasks(tmp_path / "out", packages=["h11"], num_tasks=0, seed=0)


def test_a_place_that_a_symptom_names_gets_another_symptom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `number` is in one of the two symptoms of a constant, and `count` in the other.
    package = tmp_path / "toy_symptoms"
    package.mkdir()
    (package / "__init__.py").touch()
    body = "(alpha, beta, gamma):\n    alpha.beta.gamma\n    return 3\n"
    (package / "first.py").write_text(f"def number{body}")
    (package / "second.py").write_text(f"def other{body}".replace("return 3", "pass"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for seed in range(4):
        out = tmp_path / f"out{seed}"
        (task,) = write_package_tasks(out, packages=["toy_symptoms"], num_tasks=1, seed=seed)
        assert gold_of(task)["functions"] == ["toy_symptoms/first.py:number"]
        assert (task / "instruction.md").read_text().startswith("A count comes out too high.\n")
