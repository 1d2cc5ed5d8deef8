"""The variables and override names of the Arctic launch blocks, as overrides of a recipe.

A launch block that was written for those recipes sets variables, names a script and ends in overrides; with
these two tables only the script's path changes.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from pilotage.errors import ConfigError

_VARIABLES: Mapping[str, str] = {
    "TRAIN_HARBOR_TASKS": "tasks.train",
    "EVAL_HARBOR_TASKS": "tasks.held_out",
    "HARBOR_SKILL": "rollouts.skills",
    "HARBOR_AGENT": "rollouts.agent",
    "HARBOR_ENV": "rollouts.environment",
    "OPENHANDS_TOOLS": "rollouts.tools",
    "OPENHANDS_SYSTEM_PROMPT_FILE": "rollouts.system_prompt_file",
    "OPENHANDS_WORKSPACE": "rollouts.trials_directory",
    "STARTUP_TIMEOUT": "job.startup_timeout_s",
    "LOGGER": "logger",
}
_LISTS = frozenset({"tasks.train", "tasks.held_out", "rollouts.skills", "rollouts.tools"})
_NAMES = frozenset({"logger"})
_NUMBERS = frozenset({"job.startup_timeout_s"})
_AGENTS: Mapping[str, str] = {
    "OpenHandsHarborAgent": "openhands",
    "harbor_rl.agent:OpenHandsHarborAgent": "openhands",
}
_ENVIRONMENTS: Mapping[str, str] = {
    "HostEnvironment": "host",
    "SnowflakeSandboxEnvironment": "snowflake",
}
_OVERRIDES: Mapping[str, str] = {
    "trainer.max_training_steps": "loop.num_steps",
    "trainer.train_batch_size": "loop.tasks_per_step",
    "trainer.eval_interval": "loop.evaluation.every_steps",
    "trainer.ckpt_interval": "loop.checkpoint_every_steps",
    "trainer.policy.optimizer_config.lr": "loop.optimizer.learning_rate",
    "trainer.seed": "loop.seed",
    "trainer.logger": "logger",
    "generator.n_samples_per_prompt": "loop.group_size",
    "generator.max_turns": "rollouts.max_turns",
    "generator.sampling_params.temperature": "loop.sampling.temperature",
}


def environment_overrides(environment: Mapping[str, str]) -> list[str]:
    """Return the overrides that the variables of a launch block ask for.

    Raises:
        ConfigError: STARTUP_TIMEOUT is no number.
    """
    overrides: list[str] = []
    for variable, key in _VARIABLES.items():
        text = environment.get(variable, "").strip()
        if text:
            overrides.append(f"{key}={_toml(variable, key, text)}")
    return overrides


def _toml(variable: str, key: str, text: str) -> str:
    if key in _LISTS:
        items = [item.strip() for item in text.replace(":", ",").split(",") if item.strip()]
        return orjson.dumps(items).decode()
    if key in _NAMES:
        # LOGGER=wandb, LOGGER=console,wandb and LOGGER='["console","wandb"]' are all in use.
        return orjson.dumps(",".join(re.findall(r"[\w-]+", text))).decode()
    if key in _NUMBERS:
        try:
            return str(float(text))
        except ValueError:
            raise ConfigError(f"{variable} is a number of seconds, got {text!r}") from None
    return orjson.dumps({**_AGENTS, **_ENVIRONMENTS}.get(text, text)).decode()


def translated(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the names of the Arctic recipes replaced by ours; others stay.

    Raises:
        ConfigError: a `trainer.` or `generator.` override that has no counterpart here.
    """
    found: list[str] = []
    for text in overrides:
        key, separator, value = text.partition("=")
        if key in _OVERRIDES:
            found.append(f"{_OVERRIDES[key]}{separator}{value}")
        elif key.startswith(("trainer.", "generator.")):
            raise ConfigError(f"override {key} has no counterpart here; known are {', '.join(_OVERRIDES)}")
        else:
            found.append(text)
    return found


def run_directory(environment: Mapping[str, str], runs: Path, name: str) -> Path:
    """Return where a run goes: CKPT_DIR itself, or RUN_NAME or `name` below `runs`."""
    if directory := environment.get("CKPT_DIR", "").strip():
        return Path(directory)
    return runs / (environment.get("RUN_NAME", "").strip() or name)
