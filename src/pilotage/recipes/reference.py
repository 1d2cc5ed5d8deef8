"""The reference hyperparameters, frozen: a recipe of a reference's name has them, a fork lists its changes.

What is here decides what is learnt. Where a run takes place, on which tasks, with which agent, for how many
steps and from which seed is free.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

_COMMON: Mapping[str, Any] = {
    "loop.tasks_per_step": 8,
    "loop.group_size": 8,
    "loop.scale_advantages_by_std": False,
    "loop.checkpoint_every_steps": 10,
    "loop.turns_exhausted": "mask",
    "loop.sampling.temperature": 1.0,
    "loop.sampling.top_p": 1.0,
    "loop.sampling.top_k": 0,
    "loop.sampling.max_tokens": 8192,
    "loop.evaluation.temperature": 0.6,
    "loop.loss.policy_loss": "gspo",
    "loop.loss.reduction": "sequence_mean",
    "loop.loss.clip_low": 3e-4,
    "loop.loss.clip_high": 4e-4,
    "loop.loss.kl_coef": 0.0,
    "loop.optimizer.learning_rate": 1e-6,
    "policy.max_context_tokens": 40_960,
    "policy.enable_thinking": False,
    "rollouts.max_turns": 10,
}

REFERENCES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "harbor": _COMMON,
        "code_localization": {
            **_COMMON,
            "rollouts.tools": ["terminal", "localization_finish"],
            "rollouts.expects_hand_in": True,
            "rollouts.submission_floor": 0.0,
            "rollouts.reward_key": "reward",
        },
    }
)
"""Name -> dotted key -> value. Of the Arctic code-localization launcher, and of CodeScout before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A hyperparameter that differs from the reference."""

    key: str
    reference: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} (reference {self.reference!r})"


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return list(value) if isinstance(value, tuple) else value


def changes(config: Mapping[str, Any], reference: str) -> list[Change]:
    """Return how a resolved config differs from a reference, in the order of its keys."""
    return [
        Change(key=key, reference=wanted, value=value)
        for key, wanted in REFERENCES[reference].items()
        if (value := _value(config, key)) != wanted
    ]


def hyperparameter_digest(config: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of what a run learns by: limits, adapter, loop without seed and steps."""
    loop = {key: value for key, value in config["loop"].items() if key not in ("seed", "num_steps")}
    rollouts = {key: _value(config, f"rollouts.{key}") for key in ("max_turns", "tools", "expects_hand_in")}
    kept = {"loop": loop, "rollouts": rollouts, "context": _value(config, "policy.max_context_tokens")}
    if (adapter := _value(config, "policy.peft_config")) is not None:
        kept["adapter"] = adapter
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def describe_recipe(config: Mapping[str, Any]) -> list[str]:
    """Return lines that say by which recipe a run learns, from its resolved config."""
    lines = [f"recipe {config['name']}, hyperparameters {hyperparameter_digest(config)}"]
    reference = config.get("reference")
    if reference is None:
        return lines
    changed = changes(config, reference)
    lines[0] += f", those of {reference}" if not changed else f", a fork of {reference}:"
    return [*lines, *(f"  {change}" for change in changed)]
