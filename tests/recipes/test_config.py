"""Recipes: what is refused and how, what an override may say, and that a saved recipe is the same recipe."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.errors import ConfigError
from pilotage.loops.run_directory import config_digest
from pilotage.recipes import Recipe, load_recipe
from pilotage.types import PolicyLoss

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo.toml"
SMALLEST = 'name = "small"\npolicy.model = "model"\n'


def write(tmp_path: Path, text: str = SMALLEST) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((f"{path}", "an override", "override"))
    return message.removeprefix(f"{path}: ")


# --- what is refused ---


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    expected = "No such file or directory; give a recipe file, for example recipes/demo.toml"
    assert refusal(tmp_path / "none.toml") == expected


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "name = ")
    assert refusal(path).startswith(f"{path} is not TOML: ")
    path.write_bytes(b'name = "\xff"\n')
    assert refusal(path).startswith(f"{path} is not TOML: ")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nmae = 1", "nmae"),
        ("loop.steps = 1", "loop.steps"),
        ("loop.optimizer.lr = 1e-3", "loop.optimizer.lr"),
        ("loop.evaluation.every = 1", "loop.evaluation.every"),
        ("tasks.test = []", "tasks.test"),
    ],
)
def test_an_unknown_key_is_named_at_any_depth(tmp_path: Path, text: str, key: str) -> None:
    expected = f"unknown key {key}; docs/reference.md lists the keys"
    assert refusal(write(tmp_path, SMALLEST + text + "\n")) == expected
    assert refusal(write(tmp_path), text.replace(" = ", "=")) == expected


@pytest.mark.parametrize(
    ("text", "key"), [('name = "x"', "policy"), ('name = "x"\n[policy]', "policy.model"), ("", "name")]
)
def test_a_missing_key_is_named(tmp_path: Path, text: str, key: str) -> None:
    assert refusal(write(tmp_path, text)) == f"missing key {key}"


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("loop.num_steps=0", "loop.num_steps = 0: "),
        ("loop.num_steps=many", "loop.num_steps = 'many': "),
        ("loop.group_size=1", "loop.group_size = 1: "),
        ("loop.turns_exhausted=drop", "loop.turns_exhausted = 'drop': "),
        ("loop.loss.policy_loss=sft", "loop.loss.policy_loss = 'sft': "),
        ("backend=ray", "backend = 'ray': "),
        ("name='a/b'", "name = 'a/b': "),
        ("rollouts.workers=-1", "rollouts.workers = -1: "),
        ("loop=3", "loop = 3: "),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, override: str, fault: str) -> None:
    assert refusal(write(tmp_path), override).startswith(fault)


def test_trials_on_hosts_need_workers(tmp_path: Path) -> None:
    said = refusal(write(tmp_path), "rollouts.workers=0", "rollouts.ray_address=auto")
    assert said == (
        "rollouts: workers = 0 runs trials in the driver, and ray_address on hosts; set one of them"
    )


INSIDE = "rollouts.agent_route=address"


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            [INSIDE, "rollouts.proxy_address=box"],
            'proxy_address = "box" is no HOST:PORT',
        ),
        ([INSIDE, "rollouts.proxy_address=box:70000"], 'proxy_address = "box:70000" is no HOST:PORT'),
        (
            [INSIDE, "rollouts.proxy_address='0.0.0.0:8000'"],
            "every address of this machine",
        ),
        ([INSIDE, "rollouts.proxy_address='[::]:8000'"], "name it here, or set proxy_url"),
        ([INSIDE, "rollouts.proxy_url=box:80"], 'proxy_url = "box:80" is no http or https URL'),
        ([INSIDE, "rollouts.proxy_url='https://'"], "is no http or https URL of a host and a path"),
        ([INSIDE, "rollouts.proxy_url='https://box/?a=b'"], "is no http or https URL of a host and a path"),
        ([INSIDE, "rollouts.proxy_url='https://me@box'"], "proxy_url has a user or a password"),
        ([INSIDE, "rollouts.proxy_url='https://:secret@box'"], "proxy_url has a user or a password"),
        (["rollouts.proxy_url='https://box'"], 'proxy_address and proxy_url are for agent_route = "address"'),
        (
            [INSIDE, "rollouts.proxy_address='10.0.0.1:0'", "rollouts.ray_address=auto"],
            "proxy_address and proxy_url are not for ray_address",
        ),
    ],
)
def test_a_proxy_that_no_agent_would_find_is_refused(
    tmp_path: Path, overrides: list[str], fault: str
) -> None:
    said = refusal(write(tmp_path), *overrides)
    assert fault in said
    assert said.startswith("rollouts: ")
    assert "secret" not in said


@pytest.mark.parametrize("override", ["loop.seed", "=3", " =3"])
def test_an_override_without_key_or_value_is_refused(tmp_path: Path, override: str) -> None:
    assert refusal(write(tmp_path), override) == f"an override is a.b=value, got {override!r}"


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    expected = "override 'name.first=x': name is a value, not a section"
    assert refusal(write(tmp_path), "name.first=x") == expected


# --- what an override may say ---


def test_overrides_are_numbers_strings_lists_and_tables(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path),
        [
            "loop.seed=7",
            "loop.optimizer.learning_rate=3e-4",
            "rollouts.expects_hand_in=true",
            "rollouts.agent=module:Class",
            'rollouts.environment="docker"',
            'rollouts.tools=["terminal", "code_search"]',
            "loop.evaluation={every_steps = 2, temperature = 0.5}",
            "rollouts.agent_options.depth=2",
            " loop.loss.policy_loss =grpo",
        ],
    )
    assert recipe.loop.seed == 7
    assert recipe.loop.optimizer.learning_rate == 3e-4
    assert recipe.rollouts.expects_hand_in is True
    assert (recipe.rollouts.agent, recipe.rollouts.environment) == ("module:Class", "docker")
    assert recipe.rollouts.tools == ("terminal", "code_search")
    assert (recipe.loop.evaluation.every_steps, recipe.loop.evaluation.temperature) == (2, 0.5)
    assert recipe.rollouts.agent_options == {"depth": 2}
    assert recipe.loop.loss.policy_loss is PolicyLoss.GRPO


def test_a_value_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ["rollouts.agent_options.flag=a=b"]).rollouts.agent_options == {
        "flag": "a=b"
    }


def test_the_last_override_of_a_key_wins_over_the_others_and_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST + "loop.seed = 1\n")
    assert load_recipe(path).loop.seed == 1
    assert load_recipe(path, ["loop.seed=2", "loop.seed=3"]).loop.seed == 3


# --- paths ---


def test_the_files_paths_start_at_the_file_and_an_overrides_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(
        tmp_path / "recipes",
        'name = "x"\npolicy.model = "model"\ntasks.train = ["../tasks", "/abs"]\n'
        'rollouts.system_prompt_file = "prompt.txt"\n',
    )
    recipe = load_recipe(path, ['tasks.held_out=["mine"]', 'rollouts.skills=["s.md"]'])
    assert recipe.policy.model == tmp_path / "recipes" / "model"
    assert recipe.tasks.train == (tmp_path / "recipes" / ".." / "tasks", Path("/abs"))
    assert recipe.rollouts.system_prompt_file == tmp_path / "recipes" / "prompt.txt"
    assert recipe.tasks.held_out == (tmp_path / "elsewhere" / "mine",)
    assert recipe.rollouts.skills == (tmp_path / "elsewhere" / "s.md",)
    assert load_recipe(path, ["policy.model=other"]).policy.model == tmp_path / "elsewhere" / "other"


def test_a_path_that_is_no_text_is_refused_with_its_key(tmp_path: Path) -> None:
    assert refusal(write(tmp_path), "tasks.train=[3]").startswith("tasks.train.0 = 3: ")
    assert refusal(write(tmp_path), "policy.model=3").startswith("policy.model = 3: ")


# --- what is saved ---


def again(recipe: Recipe) -> dict[str, Any]:
    """What a run directory reads back."""
    return tomllib.loads(tomli_w.dumps(recipe.resolved()))


def test_a_resolved_recipe_goes_through_toml_to_the_same_digest() -> None:
    recipe = load_recipe(DEMO)
    assert config_digest(again(recipe)) == config_digest(recipe.resolved())
    assert Recipe.model_validate(again(recipe)) == recipe
    assert recipe.name == "demo"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**53),
    rate=st.floats(1e-12, 1, allow_subnormal=False),
    agent=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6),
    deadline=st.none() | st.floats(0.1, 1e9),
    options=st.dictionaries(st.text("abc", min_size=1), st.integers(0, 9) | st.booleans(), max_size=2),
)
def test_any_recipe_goes_through_toml_to_the_same_digest(
    seed: int, rate: float, agent: str, deadline: float | None, options: dict[str, Any]
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "policy": {"model": "/m"},
            "rollouts": {"agent": agent, "agent_deadline_s": deadline, "agent_options": options},
            "loop": {"seed": seed, "optimizer": {"learning_rate": rate}},
        }
    )
    assert config_digest(again(recipe)) == config_digest(recipe.resolved())
    assert Recipe.model_validate(again(recipe)) == recipe


def test_a_changed_value_changes_the_digest() -> None:
    assert config_digest(load_recipe(DEMO, ["loop.seed=1"]).resolved()) != config_digest(
        load_recipe(DEMO).resolved()
    )
