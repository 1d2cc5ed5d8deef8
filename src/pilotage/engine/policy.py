"""A tiny policy of our own, and what a model directory must hold.

`create_policy` writes an ordinary Hugging Face directory, so everything else treats the tiny policy like
any other model. It does not train: a new policy is random.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from pilotage.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_ONE_OF_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Size of a Qwen3 policy; the vocabulary's size comes from its tokenizer."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    intermediate_size: int = 384
    max_position_embeddings: int = 8192
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    has_copy_prior: bool = False
    """Start as `copy_prior` describes, instead of at random; `init_std` is not read then."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size must be even for rotary positions, got {self.head_size}")


def create_policy(directory: Path, *, config: PolicyConfig, tokenizer_dir: Path, seed: int) -> Path:
    """Write a randomly initialised Qwen3 policy with the tokenizer of `tokenizer_dir`; return `directory`.

    The same config, tokenizer and seed give the same weights. Embeddings are tied.

    Raises:
        ConfigError: `tokenizer_dir` holds no tokenizer.json, or `directory` holds something already.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer_file = tokenizer_dir / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(f"{tokenizer_dir} holds no tokenizer.json; a new policy needs a tokenizer first")
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; remove it, or choose another directory")
    model_config = Qwen3Config(
        vocab_size=Tokenizer.from_file(str(tokenizer_file)).get_vocab_size(with_added_tokens=True),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.init_std,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Qwen3ForCausalLM(model_config)
    if config.has_copy_prior:
        from pilotage.engine.copy_prior import install_copy_prior

        install_copy_prior(module, seed=seed)
    disable_progress_bar()
    module.save_pretrained(directory)
    copy_tokenizer(tokenizer_dir, directory)
    return directory


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and its chat template."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def check_model_dir(directory: Path) -> None:
    """Refuse a directory that is no complete model.

    Raises:
        ConfigError: it has no config.json, no weights or no tokenizer, and the message names what is missing;
            or it holds an adapter.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give a Hugging Face model directory")
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{directory} is an adapter and no model; give the peft_config that it was trained with, and the"
            " model below it"
        )
    missing = [
        name
        for name, found in (
            ("config.json", (directory / "config.json").is_file()),
            ("weights (*.safetensors)", any(any(directory.glob(p)) for p in _WEIGHT_PATTERNS)),
            ("tokenizer (tokenizer.json)", any((directory / n).is_file() for n in _ONE_OF_TOKENIZER)),
        )
        if not found
    ]
    if missing:
        raise ConfigError(f"{directory} is not a complete model directory; missing: {', '.join(missing)}")


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Read the ids that end a generation, from generation_config.json or else config.json; may be empty."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
