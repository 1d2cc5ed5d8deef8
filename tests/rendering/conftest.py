"""Model directories to render for: a tiny one made here, and the official ones from the cache."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rendering.official import OfficialTemplate
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pilotage.rendering import CHATML_TEMPLATE, TokenizerFile

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>")


QWEN_MARKERS = (*MARKERS, "<think>", "</think>", "<tool_response>", "</tool_response>")


def byte_tokenizer(markers: tuple[str, ...] = MARKERS) -> Tokenizer:
    """A token for each byte, then the markers: ids 0 to 255 are text, 256 and up are control tokens."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with our ChatML template and a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> TokenizerFile:
    return TokenizerFile.load(tiny_model_dir)


@pytest.fixture(scope="session")
def qwen_dir() -> Path:
    """The official Qwen3 tokenizer; Qwen3.5's is in no registry, and its markers are in this one too."""
    directory = CACHE / "qwen3"
    if not (directory / "tokenizer.json").is_file() or not (CACHE / "templates").is_dir():
        pytest.skip("run scripts/fetch_test_tokenizers.py")
    return directory


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_dir: Path) -> TokenizerFile:
    return TokenizerFile.load(qwen_dir)


@pytest.fixture(scope="session")
def official(qwen_dir: Path, tiny_model_dir: Path) -> Callable[[str], OfficialTemplate]:
    """Official templates by name, as the transformers library renders and encodes them."""
    encode = OfficialTemplate.encoder_of(qwen_dir)

    def load(name: str) -> OfficialTemplate:
        is_ours = name == "chatml"
        source = CHATML_TEMPLATE if is_ours else (CACHE / "templates" / f"{name}.jinja").read_text()
        return OfficialTemplate(source=source, tokenizer=encode)

    return load


@pytest.fixture
def model_dir(qwen_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a model directory with the named official template and a tokenizer of single bytes."""

    def make(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        byte_tokenizer(QWEN_MARKERS).save(str(directory / "tokenizer.json"))
        shutil.copy(qwen_dir.parent / "templates" / f"{name}.jinja", directory / "chat_template.jinja")
        return directory

    return make
