"""Tiny model directories of several architectures, and what the module itself says of a sequence."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from pilotage.engine.modules import load_module

VOCAB_SIZE = 32
STOP = 0

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "qwen2": Qwen2Config(**_SHAPE),  # biases: not fused, but its head is linear
    "mistral": MistralConfig(**_SHAPE, head_dim=16, sliding_window=None),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_positions=256, n_embd=32, n_layer=2, n_head=4),
}


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer whose words are t0, t1, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


def write_model(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a random model whose logits differ enough for a wrong cache to show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name])
        for parameter in module.parameters():
            parameter.data += 0.15 * torch.randn_like(parameter)
    module.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@functools.cache
def _module(directory: Path) -> PreTrainedModel:
    return load_module(directory, device=torch.device("cpu"))


def module_logprobs(directory: Path, ids: list[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return [L - 1, V]: what the module predicts after each id but the last, in one plain forward pass."""
    with torch.no_grad():
        logits = _module(directory)(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def random_ids(rng: np.random.Generator, size: int) -> NDArray[np.int32]:
    """Return ids that are no stop token."""
    return rng.integers(1, VOCAB_SIZE, size).astype(np.int32)
