"""Laws of the repository itself: what may be imported, what may be written, and that the pages are true."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.write_reference import REFERENCE, TABLES, rendered

from pilotage.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "skills").rglob("*.md")),
)
HEAVY = ("torch", "transformers", "harbor", "openhands", "litellm", "starlette", "uvicorn", "matplotlib")
COMMAND = Path(sys.executable).with_name("pilotage")


def tracked() -> list[Path]:
    """Text files under version control."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and is_text(ROOT / name)]


def is_text(path: Path) -> bool:
    return path.is_file() and b"\0" not in path.read_bytes()[:8192]


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# --- imports ---


def test_importing_the_package_takes_under_50_ms() -> None:
    program = "import time; t = time.process_time(); import pilotage; print(time.process_time() - t)"
    assert min(float(python(program)) for _ in range(3)) < 0.05


@pytest.mark.parametrize("module", ["pilotage", "pilotage.cli", "pilotage.recipes"])
def test_importing_a_command_brings_in_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(program) == "[]"


def test_a_driver_of_a_service_needs_no_torch_and_a_service_no_agents() -> None:
    driver = "import sys, pilotage.recipes.stack, pilotage.client"
    service = "import sys, pilotage.service.serving, pilotage.cli.service, pilotage.cli.engine"
    for program, absent in (
        (driver, ["torch", "transformers", "ray", "vllm"]),
        (service, ["harbor", "openhands", "litellm", "torch"]),
    ):
        found = python(f"{program}; print([name for name in {absent} if name in sys.modules])")
        assert found == "[]", program


# --- what is written ---


def forbidden() -> Iterator[re.Pattern[str]]:
    """Paths of one machine, hosts of one registry, keys; in pieces, so that this file is not found."""
    yield re.compile("/" + "work/(main|shared|env)|" + "/root" + "/[.a-z]|/home" + "/[a-z]")
    yield re.compile("pypi" + r"\.org|python" + r"hosted\.org|registry\.npm" + r"js|--index" + r"-url [^-\s]")
    yield re.compile("(gh[pousr]_|AK" + r"IA|xox[bp]-|sk-)[A-Za-z0-9]{16,}|BEGIN [A-Z ]*PRIVATE " + "KEY")
    yield re.compile(r"://[^/\s:@{}]+:[^/\s@{}]+@")
    # One of Harbor's agents has such a name: `claude-code`.
    yield re.compile(
        "cla" + r"ude(?!-code\b)|chat" + r"gpt|co-authored" + "-by|language " + "model wrote", re.IGNORECASE
    )


def test_no_file_names_a_machine_a_registry_a_key_or_its_making() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.name != "constraints.txt"  # names of packages only; see the next test
        for pattern in forbidden()
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_pins_are_exact_and_name_no_source() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [
        line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][A-Za-z0-9.+]*", line)
    ] == []
    assert not (ROOT / "uv.lock").exists()


def test_every_dependency_is_pinned() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = declared["optional-dependencies"]
    apart = {
        "gpu",
        "mlflow",
        "trackio",
    }  # want versions that the other extras do not, so are not pinned with them
    lines = [
        *declared["dependencies"],
        *(line for extra in extras if extra not in apart for line in extras[extra]),
    ]
    names = {re.split(r"[\[><=]", line)[0] for line in lines} - {"pilotage"}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert len(names) > 20
    assert names - pinned == set()


def test_source_files_and_functions_stay_within_their_budgets() -> None:
    too_long: list[str] = []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 500:
            too_long.append(str(path.relative_to(ROOT)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= 60:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert too_long == []


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []  # pytest would take one for the other


def test_every_package_says_what_it_is() -> None:
    for path in (ROOT / "src" / "pilotage").glob("*/__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(docstring) > 60, path
        assert "laceholder" not in docstring, path


# --- the pages are true ---


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_a_page_says_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == rendered(page), "run `make reference`"


def metric_names() -> Iterator[str]:
    """Names of metrics in the loop's source; of a computed name, the part before it is computed."""
    group = re.compile(
        r"(reward|outcome|ledger|branch|proxy|rollout|group|policy|optim|lag|time|eval)/[\w/]*"
    )
    for path in (ROOT / "src" / "pilotage" / "loops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and group.fullmatch(node.value):
                yield node.value


def test_every_metric_is_documented() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    names = set(metric_names())
    assert "reward/mean" in names
    assert sorted(name for name in names if f"`{name}" not in page) == []


def test_links_between_pages_lead_somewhere() -> None:
    broken: list[str] = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def block_lines() -> Iterator[str]:
    """Lines that pages show in blocks, without variables set before a command."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield from (re.sub(r"^([A-Z]+=\S* )+", "", line) for line in block.splitlines())


def shown_commands() -> Iterator[str]:
    """Command lines that pages show: in a block, or between backticks."""
    yield from block_lines()
    for page in PAGES:
        yield from re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


def test_every_make_target_on_a_page_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))
    shown = {line.split()[1] for line in shown_commands() if re.match(r"make [a-z]+", line)}
    assert {"demo", "test", "check"} <= shown
    assert shown <= targets


def test_every_pilotage_command_and_option_on_a_page_exists() -> None:
    shown: dict[tuple[str, ...], set[str]] = {}
    for line in shown_commands():
        found = re.match(r"pilotage ((?:data |jobs )?[a-z-]+)\b(.*)", line)
        if found:
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", found.group(2).partition("#")[0])
            shown.setdefault(tuple(found.group(1).split()), set()).update(options)
    assert {("train",), ("data", "demo"), ("report",)} <= shown.keys()
    for command, options in shown.items():
        done = subprocess.run([COMMAND, *command, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        assert [option for option in options if option not in done.stdout] == [], command


def test_every_command_line_in_a_block_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in block_lines() if re.match(r"pilotage (?!data|token)[a-z-]+ [^-]", line)]
    assert len(lines) > 10
    monkeypatch.chdir(tmp_path)  # where nothing is that the commands name, so none of them starts
    refused: list[str] = []
    for line in lines:
        try:
            assert main(shlex.split(line, comments=True)[1:]) == 2, line
        except SystemExit:
            refused.append(capsys.readouterr().err.splitlines()[-1])
    assert refused == []


# --- the scripts ---


def test_another_python_is_refused_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.11.9" && exit 0\nexit 1\n')
    old.chmod(0o755)
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    done = subprocess.run(
        [tmp_path / "bash", ROOT / "scripts" / "install.sh", str(tmp_path / "venv")],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "pilotage install: Pilotage needs Python 3.12 or 3.13, found Python 3.11.9;"
        " install python3.12 and try again"
    ]


def demo_commands(root: Path, *arguments: str) -> list[str]:
    """Run a copy of the demo script with a command that writes down how it was called."""
    script = root / "scripts" / "demo.sh"
    script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "demo.sh", script)
    command = root / "pilotage"
    serving = 'if [ "$1" = serve ]; then echo "serving on http://127.0.0.1:9"; exec sleep 60; fi'
    find_out = 'while [ "$1" != --out ]; do shift; done; mkdir -p "$2"; touch "$2/yield.md"'
    making = f'if [ "$1" = data ]; then {find_out}; fi'
    command.write_text(f'#!/bin/sh\necho "$* $ARCTIC_CORTEX_BASE_URL" >> {root}/calls\n{serving}\n{making}\n')
    command.chmod(0o755)
    calls = root / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run([script, str(command), "1", *arguments], check=True, env={"PATH": os.environ["PATH"]})
    return [line.strip() for line in calls.read_text().splitlines()]


def test_the_demo_makes_its_tasks_once_and_passes_the_seed(tmp_path: Path) -> None:
    expected = [
        "train recipes/demo.toml backend=local loop.seed=1 --run-name demo-seed1",
        "baseline --json --methods random,bm25-1 tasks/demo/held_out",
        "report --window 5 --anchors tasks/demo/anchors.json runs/demo-seed1",
    ]
    assert demo_commands(tmp_path) == ["data demo --out tasks/demo", *expected]
    assert demo_commands(tmp_path) == expected


def test_the_demo_on_factory_tasks_makes_each_split_once_and_holds_packages_out(tmp_path: Path) -> None:
    train, held_out, *rest = demo_commands(tmp_path, "local", "factory")
    assert rest == [
        "train recipes/demo_factory.toml backend=local loop.seed=1 --run-name demo-factory-seed1",
        "baseline --json --methods random,bm25-1 tasks/factory/held_out",
        "report --window 5 --anchors tasks/factory/anchors.json runs/demo-factory-seed1",
    ]
    assert train.startswith("data make-bugs --bare-issue --out tasks/factory/train ")
    assert held_out.startswith("data make-bugs --bare-issue --out tasks/factory/held_out ")
    assert not set(re.findall(r"\S+==\S+", train)) & set(re.findall(r"\S+==\S+", held_out))
    assert demo_commands(tmp_path, "local", "factory") == rest
    (tmp_path / "tasks" / "factory" / "held_out" / "yield.md").unlink()  # written last: it was interrupted
    assert demo_commands(tmp_path, "local", "factory") == [held_out, *rest]


def test_the_demo_refuses_tasks_that_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        demo_commands(tmp_path, "local", "swe")
    assert refused.value.returncode == 2


def test_the_demo_on_a_service_of_its_own_ends_well(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "demo").mkdir(parents=True)
    started = time.monotonic()
    serve, train, _, report = demo_commands(tmp_path, "cortex")
    assert time.monotonic() - started < 30, "the service was not stopped"
    assert serve.startswith("serve --no-auth")
    assert train.endswith("--run-name demo-cortex-seed1 http://127.0.0.1:9")
    assert "runs/demo-cortex-seed1" in report


def test_the_demo_over_the_tinker_wire_asks_for_what_that_wire_has(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "demo").mkdir(parents=True)
    serve, train, *_ = demo_commands(tmp_path, "tinker")
    assert serve.startswith("serve --no-auth")
    assert train.startswith(
        "train recipes/demo.toml backend=tinker loop.seed=1"
        " loop.sampling.temperature=1 loop.loss.temperature=1 loop.loss.kl_coef=0"
    )


def test_the_demo_resumes_what_stopped_and_keeps_what_finished(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "demo").mkdir(parents=True)
    run = tmp_path / "runs" / "demo-seed1"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    (run / "events.jsonl").write_text('{"at":1.0,"event":"started"}\n')
    assert demo_commands(tmp_path)[0].endswith("loop.seed=1 --run-name demo-seed1 --resume")
    (run / "events.jsonl").write_text('{"at":1.0,"event":"finished","step":50}\n')
    assert demo_commands(tmp_path)[0].endswith("loop.seed=1 --run-name demo-seed1-2")
