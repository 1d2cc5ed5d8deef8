"""What the ids of a context say: its messages, as a ChatML template wrote them.

A header or a closing marker that the template wrote itself is left out. The messages are for people and for
other programs; what is trained are the ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pilotage.rendering import DecodedPiece

_MESSAGE_OPEN, _MESSAGE_CLOSE = "<|im_start|>", "<|im_end|>"
_TOOL_ANSWER = "<tool_response>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMessage:
    """One message of a context."""

    role: str
    """`context` where no header names one."""
    pieces: tuple[DecodedPiece, ...]

    @property
    def text(self) -> str:
        """The whole text, without the white space around it."""
        return "".join(piece.text for piece in self.pieces).strip()


def read_messages(pieces: Iterable[DecodedPiece]) -> Iterator[ContextMessage]:
    """Split a context where the template opens a message; what only white space precedes is left out."""
    role, body = "context", list[DecodedPiece]()
    is_header = False
    for piece in pieces:
        if piece.is_control and piece.text == _MESSAGE_OPEN:
            yield from _message(role, body)
            role, body, is_header = "context", [], True
        elif piece.is_control and piece.text == _MESSAGE_CLOSE:
            yield from _message(role, body)
            role, body = "context", []
        elif is_header and not piece.is_control:
            role, _, rest = piece.text.partition("\n")
            body, is_header = [DecodedPiece(text=rest)], False
        else:
            body.append(piece)
    yield from _message(role, body)


def _message(role: str, body: Sequence[DecodedPiece]) -> Iterator[ContextMessage]:
    message = ContextMessage(role=role or "context", pieces=tuple(body))
    text = message.text
    # The generation prompt, with its think block where it opens one, is no message.
    if not text or (role == "assistant" and not text.replace("<think>", "").replace("</think>", "").strip()):
        return
    is_answer = role == "user" and text.startswith(_TOOL_ANSWER)
    yield ContextMessage(role="tool", pieces=message.pieces) if is_answer else message
