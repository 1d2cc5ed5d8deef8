"""The shipped recipes, what they freeze, and launch blocks that were written for the Arctic recipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotage.errors import ConfigError
from pilotage.recipes import load_recipe
from pilotage.recipes.environment import environment_overrides, run_directory, translated
from pilotage.recipes.reference import REFERENCES, changes, describe_recipe, hyperparameter_digest

ROOT = Path(__file__).resolve().parents[2]


def shipped(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.toml"


@pytest.mark.parametrize("name", REFERENCES)
def test_a_shipped_recipe_has_the_reference_hyperparameters(name: str) -> None:
    config = load_recipe(shipped(name)).resolved()
    assert config["name"] == config["reference"] == name
    assert changes(config, name) == []
    [line] = describe_recipe(config)
    assert line == f"recipe {name}, hyperparameters {hyperparameter_digest(config)}, those of {name}"


@pytest.mark.parametrize("name", REFERENCES)
def test_where_and_how_long_is_free_and_what_is_learnt_is_not(name: str) -> None:
    free = ["loop.num_steps=4", "loop.seed=3", "backend=local", "rollouts.concurrency=4"]
    original, moved = load_recipe(shipped(name)).resolved(), load_recipe(shipped(name), free).resolved()
    assert hyperparameter_digest(original) == hyperparameter_digest(moved)

    fixed = rf"recipe {name} is a reference .*, but loop.group_size = 4 \(reference 8\); give the fork a name"
    with pytest.raises(ConfigError, match=fixed):
        load_recipe(shipped(name), ["loop.group_size=4"])


def test_a_fork_by_name_lists_what_it_changed() -> None:
    fork = ["name=mine", "loop.group_size=4", "loop.optimizer.learning_rate=2e-6"]
    config = load_recipe(shipped("code_localization"), fork).resolved()
    first, *rest = describe_recipe(config)
    assert first.endswith(", a fork of code_localization:")
    assert rest == [
        "  loop.group_size = 4 (reference 8)",
        "  loop.optimizer.learning_rate = 2e-06 (reference 1e-06)",
    ]
    assert hyperparameter_digest(config) != hyperparameter_digest(
        load_recipe(shipped("code_localization")).resolved()
    )


def test_the_variables_of_a_launch_block_are_overrides(tmp_path: Path) -> None:
    overrides = environment_overrides(
        {
            "TRAIN_HARBOR_TASKS": "a, b:c",
            "EVAL_HARBOR_TASKS": "d",
            "HARBOR_SKILL": "skill.md",
            "HARBOR_AGENT": "OpenHandsHarborAgent",
            "HARBOR_ENV": "HostEnvironment",
            "OPENHANDS_TOOLS": "terminal,finish",
            "OPENHANDS_SYSTEM_PROMPT_FILE": "p.txt",
            "OPENHANDS_WORKSPACE": str(tmp_path),
            "STARTUP_TIMEOUT": "14400",
            "LOGGER": "console,wandb",
            "UNRELATED": "x",
        }
    )
    recipe = load_recipe(shipped("harbor"), overrides)
    here = Path.cwd()
    assert recipe.logger == ("console", "wandb")
    assert recipe.tasks.train == (here / "a", here / "b", here / "c")
    assert recipe.tasks.held_out == (here / "d",)
    assert recipe.rollouts.skills == (here / "skill.md",)
    assert (recipe.rollouts.agent, recipe.rollouts.environment) == ("openhands", "host")
    assert recipe.rollouts.tools == ("terminal", "finish")
    assert recipe.rollouts.system_prompt_file == here / "p.txt"
    assert recipe.rollouts.trials_directory == tmp_path
    assert recipe.job.startup_timeout_s == 14400.0
    assert environment_overrides({"HARBOR_AGENT": " "}) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STARTUP_TIMEOUT": "4h"}, "STARTUP_TIMEOUT is a number of seconds, got '4h'"),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_overrides(variables)


def test_override_names_of_the_arctic_recipes_are_translated() -> None:
    ours = translated(["trainer.max_training_steps=100", "generator.n_samples_per_prompt=8", "loop.seed=2"])
    assert ours == ["loop.num_steps=100", "loop.group_size=8", "loop.seed=2"]
    with pytest.raises(ConfigError, match=r"override trainer\.placement has no counterpart here; known are"):
        translated(["trainer.placement=x"])


def test_a_run_goes_where_the_block_says() -> None:
    assert run_directory({}, Path("runs"), "harbor") == Path("runs/harbor")
    assert run_directory({"RUN_NAME": "first"}, Path("runs"), "harbor") == Path("runs/first")
    assert run_directory({"RUN_NAME": "first", "CKPT_DIR": "/ckpt/x"}, Path("runs"), "h") == Path("/ckpt/x")


@pytest.mark.parametrize("script", ["harbor", "openhands/code_localization"])
def test_a_launch_script_hands_variables_and_overrides_to_its_recipe(script: str, tmp_path: Path) -> None:
    program = ROOT / "recipes" / "rl" / script / "run_qwen35_4b.sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "TRAIN_HARBOR_TASKS": str(tmp_path / "nowhere"),
        "RUN_NAME": "first",
    }
    done = subprocess.run(
        [str(program), "trainer.max_training_steps=4", "backend=local"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"pilotage: {tmp_path / 'nowhere'}: no such directory" in done.stderr
    assert list(tmp_path.iterdir()) == []
