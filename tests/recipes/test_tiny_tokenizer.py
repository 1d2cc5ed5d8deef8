"""The tiny policy's tokenizer: known words are one token, any text survives, no text is a control token."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.recipes.tiny_tokenizer import write_tokenizer
from pilotage.rendering import Markup, TokenizerFile, load_renderer

TEXTS = (
    "A limit is wrong.\nSeen with `read_limit`, `chunk2` and `_state`.\n",
    "h11/_readers.py::ChunkedReader::read_eof\nidna/core.py\n",
    '{"name": "code_search", "arguments": {"query": "a b"}}',
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, TEXTS)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> TokenizerFile:
    return TokenizerFile.load(directory)


def pieces(tokenizer: TokenizerFile, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode([text]).tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read_limit", ["read_limit"]),
        (
            "h11/_readers.py::ChunkedReader::read_eof",
            ["h11/", "_readers.py", "::ChunkedReader", "::read_eof"],
        ),
        (
            "`read_limit`, `chunk2` and `_state`",
            ["`", "read_limit", "`, `", "chunk2", "` and `", "_state", "`"],
        ),
        (
            '{"name": "code_search", "arguments": {"query": "a b"}}',
            ['{"name": "', "code_search", '", "arguments": {"query": "', "a", " ", "b", '"}}'],
        ),
    ],
)
def test_words_of_the_texts_and_the_json_around_them_are_one_token_each(
    tokenizer: TokenizerFile, text: str, expected: list[str]
) -> None:
    assert pieces(tokenizer, text) == expected


def test_a_word_of_no_text_is_spelled_in_bytes(tokenizer: TokenizerFile) -> None:
    assert pieces(tokenizer, "zq") == ["z", "q"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_as_it_was(tokenizer: TokenizerFile, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode([text]).tolist()) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([*CONTROL, *TEXTS, "<|", "im_end", "|>", "\n"]), max_size=6).map("".join))
def test_no_text_becomes_a_control_token(tokenizer: TokenizerFile, text: str) -> None:
    control = {tokenizer.find_id(marker) for marker in CONTROL}
    assert None not in control
    ids = tokenizer.encode([text]).tolist()
    assert not control.intersection(ids)
    assert tokenizer.decode(ids) == text


def test_a_template_writes_control_tokens(tokenizer: TokenizerFile) -> None:
    for marker in CONTROL:
        assert tokenizer.encode([Markup(marker)]).tolist() == [tokenizer.find_id(marker)]


def test_the_size_counts_every_piece_once_and_order_does_not_matter(directory: Path, tmp_path: Path) -> None:
    size = write_tokenizer(tmp_path, [*reversed(TEXTS), *TEXTS])
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    # Five markers, the 256 bytes, and the pieces of more than one byte; a space between words is a byte.
    assert size > 5 + 256
    assert write_tokenizer(tmp_path, []) == 5 + 256


def test_the_directory_is_one_that_the_renderer_reads(directory: Path, tokenizer: TokenizerFile) -> None:
    renderer = load_renderer(directory)
    assert renderer.stop_token_ids == (tokenizer.find_id("<|im_end|>"), tokenizer.find_id("<|endoftext|>"))
