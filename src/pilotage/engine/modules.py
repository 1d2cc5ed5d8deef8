"""Loading a Hugging Face causal language model as a torch module."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pilotage.engine.policy import check_model_dir
from pilotage.errors import ConfigError

PLAIN_DECODERS = frozenset({"qwen2", "qwen3", "llama", "mistral"})
"""Families whose layers call transformers' attention functions and take positions, and whose logits are the
output projection of the last hidden state and nothing else."""


def load_module(directory: Path, *, device: torch.device) -> PreTrainedModel:
    """Load weights in float32 and evaluation mode. Nothing is fetched from anywhere.

    Raises:
        ConfigError: the directory is incomplete, or transformers cannot read it.
    """
    check_model_dir(directory)
    disable_progress_bar()  # the terminal belongs to the command that runs, not to a library
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be loaded as a causal language model: {error}") from error
    torch.nn.Module.to(module, device)
    return module.eval()
