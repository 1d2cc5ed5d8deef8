from pathlib import Path

import pytest
from tests.engine.models import VOCAB_SIZE, write_tokenizer
from transformers import AutoConfig

from pilotage.engine import PolicyConfig, create_policy
from pilotage.engine.policy import eos_token_ids
from pilotage.errors import ConfigError

SMALL = PolicyConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, intermediate_size=24
)


def test_a_policy_is_a_function_of_config_tokenizer_and_seed(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    weights = [
        (
            create_policy(tmp_path / name, config=SMALL, tokenizer_dir=tokenizer, seed=seed)
            / "model.safetensors"
        )
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    ]
    one, same, other = (path.read_bytes() for path in weights)
    assert one == same != other
    config = AutoConfig.from_pretrained(tmp_path / "one")
    assert (config.model_type, config.vocab_size, config.head_dim) == ("qwen3", VOCAB_SIZE, 8)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_policy_needs_a_tokenizer_and_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        create_policy(tmp_path / "policy", config=SMALL, tokenizer_dir=tmp_path, seed=0)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="not empty"):
        create_policy(tokenizer, config=SMALL, tokenizer_dir=tokenizer, seed=0)


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of num_kv_heads"):
        PolicyConfig(num_heads=4, num_kv_heads=3)
    with pytest.raises(ConfigError, match="even"):
        PolicyConfig(head_size=7)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"generation_config.json": '{"eos_token_id": [3, 4]}', "config.json": '{"eos_token_id": 5}'},
            (3, 4),
        ),
        ({"config.json": '{"eos_token_id": 5}'}, (5,)),
        ({"generation_config.json": "{}", "config.json": "{}"}, ()),
        ({}, ()),
    ],
)
def test_stop_ids_come_from_the_generation_config_first(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, ...]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert eos_token_ids(tmp_path) == expected
