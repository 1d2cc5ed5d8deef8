"""A directory's `tokenizer.json`, with one rule of its own: text never becomes a control token.

A render is a list of segments. In a `Markup` (a template's own text) every added token of the tokenizer
becomes its id, as in the official tokenizer. In a plain `str` (what users, tools and policies wrote) none
does: the text is encoded by a copy of the tokenizer that has no added tokens at all. Text between two
markers is encoded as one string, whatever segments it came from, so ids equal the official ones.

It does not know roles, tools or templates.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pilotage.errors import TemplateError
from pilotage.rendering.foreign import failing_as_template_error
from pilotage.types import TokenIds, token_ids

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Markup:
    """Text of a template, in which added tokens are recognised."""

    text: str


type Segment = Markup | str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPiece:
    """Text that ids stand for."""

    text: str
    is_control: bool = False
    """Whether it is one control token, and not text that may look like one."""


class TokenizerFile:
    """Encodes segments and decodes ids. Immutable; one may serve any number of renderers."""

    def __init__(self, *, text_tokenizer: Tokenizer, added_ids: Mapping[str, int]) -> None:
        """Args:
        text_tokenizer: the tokenizer without its added tokens.
        added_ids: id of each added token, by its text.
        """
        self._text_tokenizer = text_tokenizer
        self._added_ids = dict(added_ids)
        self._added_texts = {added: text for text, added in added_ids.items()}
        longest_first = sorted(added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def load(cls, model_dir: Path) -> "TokenizerFile":
        """Read `tokenizer.json` of a model directory.

        Raises:
            TemplateError: there is none, it cannot be read, or ordinary text can yield a control token.
        """
        path = model_dir / TOKENIZER_FILE
        if not path.is_file():
            raise TemplateError(f"{model_dir} has no {TOKENIZER_FILE}; give a model directory that holds one")
        with failing_as_template_error(f"{path} is not a readable tokenizer"):
            content: dict[str, Any] = json.loads(path.read_bytes())
            unknown_token = content["model"].get("unk_token")
            added = {token["content"]: token for token in content["added_tokens"]}
            content |= {"added_tokens": [], "truncation": None, "padding": None}
            text_tokenizer = Tokenizer.from_str(json.dumps(content))
        # The unknown token stands for text; every other added token is a control token.
        added.pop(unknown_token, None)
        _require_hard_boundaries(path, added)
        added_ids = {text: int(token["id"]) for text, token in added.items()}
        _require_unforgeable(path, text_tokenizer, added_ids)
        return cls(text_tokenizer=text_tokenizer, added_ids=added_ids)

    def find_id(self, marker: str) -> int | None:
        """Return the id of an added token, or None where the tokenizer has no such token."""
        return self._added_ids.get(marker)

    def encode(self, segments: Iterable[Segment]) -> TokenIds:
        """Encode segments in order; linear in their text."""
        ids: list[int] = []
        run: list[str] = []
        for segment in segments:
            for piece in self._pieces(segment):
                if isinstance(piece, str):
                    run.append(piece)
                else:
                    ids += self._encode_text("".join(run))
                    ids.append(piece)
                    run.clear()
        ids += self._encode_text("".join(run))
        return token_ids(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return "".join(piece.text for piece in self.read(ids))

    def read(self, ids: Iterable[int]) -> Iterator[DecodedPiece]:
        """Yield the text of ids in order, each control token as a piece of its own."""
        run: list[int] = []
        for token in map(int, ids):
            added = self._added_texts.get(token)
            if added is None:
                run.append(token)
                continue
            if run:
                yield DecodedPiece(text=self._text_tokenizer.decode(run))
                run.clear()
            yield DecodedPiece(text=added, is_control=True)
        if run:
            yield DecodedPiece(text=self._text_tokenizer.decode(run))

    def _pieces(self, segment: Segment) -> Iterator[str | int]:
        """Yield the text of a segment, cut at the added tokens of a markup, which come as ids."""
        if isinstance(segment, str):
            yield segment
            return
        end = 0
        for match in self._added_pattern.finditer(segment.text):
            yield segment.text[end : match.start()]
            yield self._added_ids[match.group()]
            end = match.end()
        yield segment.text[end:]

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        if not text.isascii():
            # A lone surrogate (half a character out of broken JSON) cannot be encoded; U+FFFD can.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._text_tokenizer.encode(text, add_special_tokens=False).ids


def _require_hard_boundaries(path: Path, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse added tokens that swallow the white space beside them: text would depend on its neighbour."""
    soft = [text for text, token in added.items() if token.get("lstrip") or token.get("rstrip")]
    if soft:
        raise TemplateError(
            f"{path}: added token {soft[0]!r} strips the white space beside it, so text cannot be encoded"
            " turn by turn; set its lstrip and rstrip to false"
        )


def _require_unforgeable(path: Path, text_tokenizer: Tokenizer, added_ids: Mapping[str, int]) -> None:
    control = set(added_ids.values())
    for text in added_ids:
        if control.intersection(text_tokenizer.encode(text, add_special_tokens=False).ids):
            raise TemplateError(
                f"{path}: the plain text {text!r} encodes to a control token, so a tool's output could forge"
                " one; use a pre-tokenizer that splits punctuation"
            )
