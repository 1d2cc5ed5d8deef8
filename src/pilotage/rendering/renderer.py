"""The renderer: one class for every template, made of a tokenizer and a dialect."""

from collections.abc import Iterator, Sequence

from pilotage.errors import TemplateError
from pilotage.rendering.dialect import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TURN_END,
    Dialect,
    ThinkBlock,
)
from pilotage.rendering.reply import ReplyMarkers, parse_reply
from pilotage.rendering.tokenizer import DecodedPiece, Markup, TokenizerFile
from pilotage.types import Message, ParsedReply, Role, TokenIds, ToolSchema

_HEADER = "<|im_start|>assistant\n"
_OTHER_END = "<|endoftext|>"


class TemplateRenderer:
    """Messages <-> tokens. A turn's prompt is the recorded ids and `render_suffix`, never a second render."""

    def __init__(self, *, tokenizer: TokenizerFile, dialect: Dialect) -> None:
        """Raises:
        TemplateError: the tokenizer lacks a control token that the dialect writes.
        """
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._end_id = _require_id(tokenizer, TURN_END)
        self._generation_prompt = Markup(_HEADER + dialect.think_block)
        other_end = tokenizer.find_id(_OTHER_END)
        self._stop_token_ids = (self._end_id,) if other_end is None else (self._end_id, other_end)
        splits = dialect.splits_reasoning
        self._markers = ReplyMarkers(
            stop_ids=self._stop_token_ids,
            call_open=_require_id(tokenizer, CALL_OPEN),
            call_close=_require_id(tokenizer, CALL_CLOSE),
            think_open=_require_id(tokenizer, THINK_OPEN) if splits else None,
            think_close=_require_id(tokenizer, THINK_CLOSE) if splits else None,
            is_think_open=dialect.think_block is ThinkBlock.OPEN,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the template's end marker first, then the tokenizer's end of text."""
        return self._stop_token_ids

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Encode a whole conversation and the generation prompt, as the template would."""
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        head = self._dialect.head(messages[0].content if has_system else None, tools)
        turns = self._dialect.turns(messages[has_system:], is_suffix=False)
        return self._tokenizer.encode([*head, *turns, self._generation_prompt])

    def render_suffix(
        self, last_id: int | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> TokenIds:
        """Encode what follows a recorded sequence; linear in the new text.

        Args:
            last_id: last recorded id. Unless it is the template's end marker, the suffix writes that marker
                first: it is context, not sampled.
            messages: the new messages only.
            tools: part of the seam; no supported template repeats the tools after its system block.
        """
        closing = Markup("\n" if last_id == self._end_id else TURN_END + "\n")
        turns = self._dialect.turns(messages, is_suffix=True)
        return self._tokenizer.encode([closing, *turns, self._generation_prompt])

    def parse(self, completion_ids: TokenIds, tools: Sequence[ToolSchema]) -> ParsedReply:
        """Read sampled ids; a malformed call keeps its raw text, for the agent to refuse."""
        return parse_reply(
            completion_ids.tolist(),
            tokenizer=self._tokenizer,
            markers=self._markers,
            read_call=lambda text: self._dialect.read_call(text, tools),
        )

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ids, control tokens included; for people, never for the sampler."""
        return self._tokenizer.decode(ids.tolist())

    def read(self, ids: TokenIds) -> Iterator[DecodedPiece]:
        """Yield what `decode` returns, each control token as a piece of its own."""
        return self._tokenizer.read(ids.tolist())


def _require_id(tokenizer: TokenizerFile, marker: str) -> int:
    found = tokenizer.find_id(marker)
    if found is None:
        raise TemplateError(
            f"the tokenizer has no token {marker!r}, which the chat template writes; add it to"
            " tokenizer.json as an added token, or use the tokenizer that belongs to the template"
        )
    return found
