"""A service's token is searched for, by its value, wherever a run and a service write or show anything."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.test_launch import RECIPE, ROOT
from tests.rollouts.rig import write_task

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(300)]
TELLTALE = """#!/bin/bash
env > /logs/verifier/environment.txt
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline > /logs/verifier/processes.txt 2> /dev/null
echo $((RANDOM % 2)) > /logs/verifier/reward.txt
"""


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "pilotage", *map(str, words)]


def shown_by_ps(secret: bytes) -> Iterator[str]:
    """Command lines that hold the secret."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if secret in text:
            yield text.replace(b"\0", b" ").decode()


def files_with(secret: bytes, *roots: Path) -> list[str]:
    return [
        str(path)
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and secret in path.read_bytes()
    ]


def test_a_token_is_in_no_command_line_log_run_directory_or_sandbox(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    write_task(tmp_path / "tasks", test_sh=TELLTALE)
    recipe = RECIPE.format(model=ROOT / "recipes" / "demo" / "policy")
    (tmp_path / "recipe.toml").write_text(recipe)
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    data, models = tmp_path / "service", ROOT / "recipes" / "demo"
    made = subprocess.run(
        command("token", "create", "tester", "--data", data),
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    secret = made.stdout.split()[-1]
    assert len(secret) > 20
    printed = (tmp_path / "service.log").open("w+")
    with subprocess.Popen(
        command("serve", "--models", models, "--data", data, "--port", "0"),
        env=environment, stdout=subprocess.PIPE, stderr=printed, text=True,
    ) as service:  # fmt: skip
        try:
            assert service.stdout is not None
            address = service.stdout.readline().split()[-1]
            seen = train(tmp_path, environment | {
                "ARCTIC_CORTEX_BASE_URL": address, "ARCTIC_CORTEX_PAT": secret,
            }, secret.encode())  # fmt: skip
        finally:
            service.terminate()
    assert seen == set()
    run = tmp_path / "runs" / "coin"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3, (tmp_path / "train.log").read_text()
    assert len(list(run.rglob("environment.txt"))) == 8, "the verifiers looked around"
    assert files_with(secret.encode(), tmp_path) == []


def train(root: Path, environment: dict[str, str], secret: bytes) -> set[str]:
    """Train two steps on the service; return the command lines that held the secret meanwhile."""
    words = command("train", "recipe.toml", "backend=cortex", "loop.num_steps=2", "rollouts.keep_trials=true")
    seen: set[str] = set()
    with (
        (root / "train.log").open("w") as log,
        subprocess.Popen(words, cwd=root, env=environment, stdout=log, stderr=log) as driver,
    ):
        while driver.poll() is None:
            seen |= set(shown_by_ps(secret))
            time.sleep(0.05)
    return seen
