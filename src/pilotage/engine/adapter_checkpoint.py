"""Adapters on disk, in peft's own format: `adapter_model.safetensors` beside `adapter_config.json`.

A checkpoint that training goes on from is such a directory. One of weights alone is the merged model, an
ordinary Hugging Face directory, with the adapter in its directory `adapter`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pilotage.engine.lora import LoraOptions, merged_weights, trained_weights
from pilotage.errors import ConfigError

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_DIRECTORY = "adapter"


def find_adapter(directory: Path) -> Path | None:
    """Return the directory of the adapter in a checkpoint of either kind; None where there is none."""
    found = (path for path in (directory, directory / _DIRECTORY) if (path / ADAPTER_FILE).is_file())
    return next(found, None)


def require_adapter(directory: Path, options: LoraOptions) -> Path:
    """Return the directory of an adapter that can go on under `options`.

    Raises:
        ConfigError: there is none, or it was trained with another rank or alpha.
    """
    found = find_adapter(directory)
    if found is None:
        raise ConfigError(f"{directory} holds no {ADAPTER_FILE}; an adapter is what is trained here")
    path = found / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stored = {"r": config["r"], "lora_alpha": config["lora_alpha"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not the config of a LoRA adapter: {error!r}") from error
    stored |= {
        name: True for name in ("use_rslora", "use_dora", "alora_invocation_tokens") if config.get(name)
    }
    wanted = {"r": options.rank, "lora_alpha": options.alpha}
    if stored != wanted:
        raise ConfigError(f"{path} has {_listed(stored)}, and {_listed(wanted)} is what is trained here")
    return found


def write_adapter_config(directory: Path, options: LoraOptions, *, base_dir: Path) -> None:
    """Write what a reader of an adapter needs beside its weights.

    Args:
        base_dir: the model that it was trained on.
    """
    from peft import LoraConfig

    config = LoraConfig(
        base_model_name_or_path=str(base_dir),
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=options.targets,
    )
    config.save_pretrained(str(directory))


def save_adapter(directory: Path, module: PreTrainedModel, options: LoraOptions, *, base_dir: Path) -> None:
    """Write a module's adapter into an existing directory."""
    weights = {name: weight.detach().contiguous() for name, weight in trained_weights(module).items()}
    save_file(weights, directory / ADAPTER_FILE, metadata={"format": "pt"})
    write_adapter_config(directory, options, base_dir=base_dir)


def save_merged(directory: Path, module: PreTrainedModel, options: LoraOptions, *, base_dir: Path) -> None:
    """Write the model that a module and its adapter amount to, and the adapter, into a directory."""
    module.save_pretrained(directory, state_dict=dict(merged_weights(module)))
    (directory / _DIRECTORY).mkdir()
    save_adapter(directory / _DIRECTORY, module, options, base_dir=base_dir)


def load_adapter(directory: Path, module: PreTrainedModel, options: LoraOptions) -> None:
    """Read an adapter into a module that has one of the same shape.

    Raises:
        ConfigError: there is none, it is of another shape, or its file is damaged.
    """
    path = require_adapter(directory, options) / ADAPTER_FILE
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read: {error}; go on from an earlier checkpoint") from error
    weights = trained_weights(module)
    stored_shapes, shapes = ({name: w.shape for name, w in of.items()} for of in (stored, weights))
    if stored_shapes != shapes:
        odd = min(set(stored_shapes.items()) ^ set(shapes.items()))[0]
        raise ConfigError(f"{path} adapts other layers than are trained here, {odd} for one")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored[name])


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
