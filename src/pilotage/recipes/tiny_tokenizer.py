"""A tokenizer for the tiny policy: every word of the texts it is given is one token.

A policy of half a million parameters can copy a token that it has seen before; it cannot spell. So the
vocabulary holds whole identifiers, path parts and runs of JSON punctuation, and single bytes for the rest:
any text can be encoded, and known words cost one token each.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from pilotage.rendering import CHATML_TEMPLATE

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
_CONTROL = (PADDING, "<|im_start|>", END_OF_TURN, "<tool_call>", "</tool_call>")

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
# The JSON around a call's words; what stands between quoted words of an issue; a path part; a name with the
# `::` before it; a word; a number; punctuation; white space. What is copied is copied whole, and each piece
# follows from the one before it.
_PIECES = Regex(
    rf'\{{"name": "|", "arguments": \{{"{_WORD}": \[?"|"\]?\}}\}}'
    rf"|`(?:, `| and `)|{_WORD}(?:\.py(?![A-Za-z0-9_])|/)|::(?:{_WORD})?|{_WORD}|[0-9]+|[^A-Za-z0-9_\s]|\s+"
)


def write_tokenizer(directory: Path, texts: Iterable[str]) -> int:
    """Write tokenizer.json, tokenizer_config.json and the ChatML template; return the vocabulary's size.

    Args:
        texts: every piece of them becomes one token; order does not matter.
    """
    pre_tokenizer = Sequence(
        [Split(_PIECES, behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    pieces = {piece for text in texts for piece, _ in pre_tokenizer.pre_tokenize_str(text)}
    vocabulary = [*_CONTROL, *sorted(ByteLevel.alphabet()), *sorted(p for p in pieces if len(p) > 1)]
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_tokenizer_config(directory)
    return len(vocabulary)


def write_tokenizer_config(directory: Path) -> None:
    """Write tokenizer_config.json with the ChatML template, for a tokenizer that has its control tokens."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "chat_template": CHATML_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
