"""Every wrong input gives one line that says what to do, and the exit code of its kind."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.algorithms.strategies import make_rollout, make_turn
from tests.ops.records import make_record

from pilotage.cli import main
from pilotage.datasets import write_package_tasks
from pilotage.loops import RunDirectory
from pilotage.recipes import load_recipe
from pilotage.recipes.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def write_task(directory: Path, *, without: str = "") -> Path:
    (directory / "environment").mkdir(parents=True, exist_ok=True)
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if name != without:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("" if name == "task.toml" else "x")
    return directory


def write_recipe(root: Path, more: str = "") -> Path:
    path = root / "recipe.toml"
    path.write_text(f'name = "small"\npolicy.model = "model"\ntasks.train = ["tasks"]\n{more}')
    return path


def line_of(capsys: pytest.CaptureFixture[str], code: int, *argv: str | Path) -> str:
    """Run a command that must fail with `code`; return its one line."""
    assert main([str(word) for word in argv]) == code
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("pilotage: ")
    assert printed.out == ""
    return line.removeprefix("pilotage: ")


# --- recipes and tasks ---


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_recipe_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = tmp_path / "none.toml"
    expected = f"{path}: No such file or directory; give a recipe file, for example recipes/demo.toml"
    assert line_of(capsys, 2, command, path) == expected


def test_an_unknown_key_in_the_file_or_in_an_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "unknown key loop.stepz; docs/reference.md lists the keys"
    path = write_recipe(tmp_path, "loop.stepz = 3\n")
    assert line_of(capsys, 2, "train", path) == f"{path}: {expected}"
    path = write_recipe(tmp_path)
    assert line_of(capsys, 2, "train", path, "loop.stepz=3") == f"{path}: {expected}"
    assert line_of(capsys, 2, "train", path, "--resume", "loop.stepz=3") == f"{path}: {expected}"


def test_a_directory_without_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path)
    assert line_of(capsys, 2, "train", path).startswith(f"{tmp_path / 'tasks'}: no such directory; ")
    (tmp_path / "tasks").mkdir()
    assert line_of(capsys, 2, "train", path).startswith(f"{tmp_path / 'tasks'}: no Harbor task in it; ")


def test_a_task_without_its_test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path)
    task = write_task(tmp_path / "tasks" / "a", without="tests/test.sh")
    runs = tmp_path / "runs"
    line = line_of(capsys, 2, "train", path, "--runs-dir", runs)
    assert line.startswith(f"{task}: no tests/test.sh; a Harbor task needs ")
    assert not runs.exists()
    line = line_of(capsys, 2, "rollout", task, "--recipe", path)
    assert line.startswith(f"{task}: no tests/test.sh; ")


def test_nothing_to_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of(capsys, 2, "eval", write_recipe(tmp_path))
    assert line == "there is nothing to evaluate; give tasks.held_out"


def test_a_rollout_of_more_than_one_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        write_task(tmp_path / "tasks" / name)
    line = line_of(capsys, 2, "rollout", tmp_path / "tasks", "--recipe", write_recipe(tmp_path))
    assert line == f"{tmp_path / 'tasks'} holds 2 tasks; give the directory of one"


@pytest.mark.agents
def test_a_model_directory_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = write_task(tmp_path / "tasks" / "a")
    path = write_recipe(tmp_path)
    expected = f"{tmp_path / 'model'} has no tokenizer.json; give a model directory that holds one"
    assert line_of(capsys, 2, "rollout", task, "--recipe", path) == expected
    (tmp_path / "model").mkdir()
    assert line_of(capsys, 2, "rollout", task, "--recipe", path) == expected
    line = line_of(capsys, 2, "rollout", task, "--recipe", path, "--policy", tmp_path / "none")
    assert line.startswith(f"{tmp_path / 'none'} is not a directory; ")


# --- runs ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step with one rollout, which the demo's tokenizer family can decode."""
    write_tokenizer(tmp_path / "model", ["hello"])
    recipe = load_recipe(write_recipe(tmp_path))
    path = tmp_path / "runs" / "small"
    with RunDirectory.open(path, recipe.resolved(), resume=False) as directory:
        directory.event("started")
        directory.write(make_record(1, 1.5))
        rollout = make_rollout("step-0001-00-00", make_turn(None, [1], [2]), reward=1.5)
        directory.add_rollout("step-0001", rollout)
    return path


@pytest.mark.parametrize("command", ["show", "report"])
def test_a_directory_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    expected = f"{tmp_path} is no run directory: it has no config.toml"
    assert line_of(capsys, 2, command, tmp_path) == expected


def test_a_rollout_that_a_run_does_not_have(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{run} has no rollout nothing; `pilotage show {run}` lists them"
    assert line_of(capsys, 2, "show", run, "nothing") == expected


def test_show_lists_a_run_and_prints_a_rollout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert "1 rollouts: step-0001-00-00 ... step-0001-00-00" in capsys.readouterr().out
    assert main(["show", str(run), "step-0001-00-00"]) == 0
    printed = capsys.readouterr().out
    assert "sampled 1 tokens mask 1" in printed
    assert "| <|im_start|>>><|im_end|><<" in printed  # ids 1 and 2


def test_report_prints_means_and_writes_the_graph(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "        1-1        1.500         4" in printed
    assert printed.endswith(f"graph: {run / 'reward_graph.svg'}\n")
    assert (run / "reward_graph.svg").is_file()


def test_a_window_that_is_not_positive(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line_of(capsys, 2, "report", run, "--window", "0") == "--window must be positive, got 0"


def test_a_run_directory_of_another_config(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "tasks" / "a")
    argv = ["train", tmp_path / "recipe.toml", "--runs-dir", run.parent]
    assert line_of(capsys, 2, *argv) == (
        f"{run} holds a run already; give --resume to go on with it, or another run name"
    )
    line = line_of(capsys, 2, *argv, "--resume", "loop.seed=9")
    assert line == f"{run} was started with another config: loop.seed was 0, is 9"


def test_demo_tasks_are_not_written_over_what_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line_of(capsys, 2, "data", "demo", "--out", tmp_path)
    assert line == f"{tmp_path} exists already; remove it, or choose another --out"


def test_a_template_of_a_directory_without_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line_of(capsys, 2, "verify-template", tmp_path)
    assert line.startswith(f"{tmp_path} has no tokenizer.json; ")


# --- usage ---


@pytest.mark.parametrize(
    "command", [[], ["train"], ["eval"], ["rollout"], ["show"], ["report"], ["data", "demo"]]
)
def test_help_exits_with_0(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pilotage")


@pytest.mark.parametrize("argv", [[], ["fly"], ["train"], ["train", "r.toml", "--fly"], ["sweep", "a.b=1"]])
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert re.search(r"^pilotage.*: error: ", capsys.readouterr().err, re.MULTILINE)


def old_python() -> str | None:
    """A Python 3.11 that really starts: a version manager's stub may be there without one."""
    for name in ("/usr/bin/python3.11", "python3.11"):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.skipif(old_python() is None, reason="no Python 3.11 on this machine")
def test_an_old_python_is_refused_with_one_line() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from pilotage.cli import main; "
    done = subprocess.run(
        [old_python() or "", "-I", "-B", "-c", program + "sys.exit(main(['train']))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"pilotage: needs Python 3\.12 or 3\.13, this is 3\.11\.\d+; run `make install`\n", done.stderr
    )


def test_baselines_are_those_that_were_named_and_score_as_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    write_package_tasks(tasks, packages=["h11"], num_tasks=2, seed=0)
    assert main(["baseline", "--json", str(tasks)]) == 0
    every = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert every["gold"]["reward"] == 3.0
    assert main(["baseline", "--json", "--methods", "bm25-1,random", str(tasks)]) == 0
    named = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert named == {name: every[name] for name in ("random", "bm25-1")}

    expected = "no method bm25; --methods are of random, bm25-1, bm25-2, bm25-3, identifiers, gold"
    assert line_of(capsys, 2, "baseline", "--methods", "bm25", tasks) == expected


def test_a_machine_that_has_run_out_of_something_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    config = {"name": "demo", "loop": {"num_steps": 1}}
    with RunDirectory.open(tmp_path / "run", config, resume=False) as run:
        run.write(make_record(1, 0.5))
    limited = 'ulimit -f 1; exec "$0" -m pilotage report run'  # of files; a graph is larger
    done = subprocess.run(
        ["bash", "-c", limited, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "pilotage: File too large: raise the limit of a file's size (ulimit -f), then give the command again"
    )
    assert "Traceback" not in done.stderr
