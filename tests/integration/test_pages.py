"""The commands of README.md and docs/how-to.md, run in their order in one fresh directory, as a reader would.

The demo's recipe is made small there, so that each takes seconds. A line that is not run has its reason here,
and a reason that no line needs any more is a failure.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotage.cli import main

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "how-to.md")
SECONDS_A_LINE = 600
SMALLER = (
    (r"num_steps = \d+", "num_steps = 3"),
    (r"tasks_per_step = \d+", "tasks_per_step = 2"),
    (r"group_size = \d+", "group_size = 2"),
    (r"every_steps = \d+", "every_steps = 3"),
    (r"workers = \d+", "workers = 1"),
)
"""Of the recipe."""
STANDS_FOR = (
    ("RECIPE.toml", "recipes/demo.toml"),
    ("runs/first", "runs/mine"),
    ("loop.num_steps=100", "loop.num_steps=3"),
    ("step-0050", "step-0003"),
    ("--min-reward 2", "--min-reward 0"),
    ("models/Qwen3-0.6B", "recipes/demo/policy"),
)
"""What the pages name that is not here."""
NOT_RUN = {
    r"make |pip install": "installs or tests everything, which continuous integration does by itself",
    r"pilotage data (make-bugs|make-repairs|swe-smith|check)": "takes packages or rows from an index",
    r"pilotage (baseline|train recipes/demo_factory)|.*--anchors": "is about tasks that those commands make",
    r".*(code_localization|backend=cortex)": "needs a model of gigabytes, or an account",
    r"pilotage (login|capacity|jobs)": "needs an account",
    r"export MY_KEY|.*--agent-kwarg": "needs an endpoint with a model",
    r"pilotage serve": "needs a certificate, and serves until it is told to stop",
    r"pilotage view( +#.*)?$|tensorboard|curl": "serves until it is told to stop, or asks who does",
    r"(OTEL_\S+ )?pilotage train recipes/demo.toml": "trains as the first command of README.md does",
    r"pilotage (launch|status|attach|stop|resume)": "is done by the tests of launched runs",
    r"export TINKER_API_KEY|TINKER_API_KEY=": "needs a server of the Tinker API",
    r"python recipes/skyrl|python -m venv skyrl|JAX_PLATFORMS": "needs SkyRL, in an environment of its own",
    r"ray start": "begins a cluster, or joins one, and goes on",
    r"pilotage warmstart|python scripts/chaos.py": "takes minutes",
    r"python scripts/fetch_smollm2|pilotage train recipes/smollm2": "fetches and trains half a gigabyte",
}


def shown_lines() -> Iterator[str]:
    """Commands of the pages' blocks; blocks in another language than the shell's are none."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if not language and not block.startswith("["):
                yield from (line for line in block.splitlines() if line.strip())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "demo.toml"
    text = recipe.read_text()
    for pattern, small in SMALLER:
        text = re.sub(pattern, small, text)
    recipe.write_text(text)
    tasks = ["--train", "6", "--held-out", "2"]
    assert main(["data", "demo", "--out", str(tmp_path / "tasks" / "demo"), *tasks]) == 0
    for name in ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "TMUX_TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    return tmp_path


def test_every_command_that_the_pages_show_works_as_it_is_shown(checkout: Path) -> None:
    used: set[str] = set()
    num_run = 0
    for line in shown_lines():
        reason = next((pattern for pattern in NOT_RUN if re.match(pattern, line)), None)
        if reason is not None:
            used.add(reason)
            continue
        for shown, stand_in in STANDS_FOR:
            line = line.replace(shown, stand_in)
        command = ["bash", "-c", line]
        done = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, timeout=SECONDS_A_LINE, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        num_run += 1
    assert used == NOT_RUN.keys()
    assert num_run > 15
