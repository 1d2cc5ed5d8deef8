"""Reading sampled ids: reasoning, content and calls, split at control ids and never at text.

A marker counts only as its control id. The same characters spelled in ordinary tokens, say in a file that
a call writes, are text. Nothing here raises on what a policy wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pilotage.rendering.dialect import CallText, malformed
from pilotage.rendering.tokenizer import TokenizerFile
from pilotage.types import Message, ParsedReply, Role, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMarkers:
    """Control ids that structure a completion; None where the tokenizer has no such token."""

    stop_ids: tuple[int, ...]
    call_open: int
    call_close: int
    think_open: int | None
    think_close: int | None
    is_think_open: bool
    """Whether the generation prompt left a think block open, so that a completion begins inside it."""


class _Kind(Enum):
    TEXT = auto()
    CALL = auto()
    UNCLOSED_CALL = auto()


def parse_reply(
    ids: Sequence[int],
    *,
    tokenizer: TokenizerFile,
    markers: ReplyMarkers,
    read_call: Callable[[str], CallText],
) -> ParsedReply:
    """Read a completion.

    A call that was not closed (the turn was cut) is malformed even where its text could be read: what was
    to follow is unknown. Text before, between and after calls is kept in the content, in order.
    """
    if ids and ids[-1] in markers.stop_ids:
        ids = ids[:-1]
    start = 0 if markers.is_think_open else _reasoning_start(ids, tokenizer, markers)
    reasoning_ids, rest = ((), ids) if start is None else _split_reasoning(ids, start, markers)
    texts: list[str] = []
    calls: list[CallText] = []
    for kind, span in _spans(rest, markers):
        text = tokenizer.decode(span)
        if kind is _Kind.TEXT:
            texts.append(text.strip("\n"))
        else:
            calls.append(read_call(text) if kind is _Kind.CALL else _unclosed(text, read_call))
    message = Message(
        role=Role.ASSISTANT,
        content="\n".join(text for text in texts if text),
        reasoning=tokenizer.decode(reasoning_ids).strip("\n"),
        tool_calls=tuple(
            ToolCall(id=f"call_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(calls)
        ),
    )
    return ParsedReply(message=message, malformed_calls=sum(call.is_malformed for call in calls))


def _unclosed(text: str, read_call: Callable[[str], CallText]) -> CallText:
    return malformed(text, read_call(text).name)


def _reasoning_start(ids: Sequence[int], tokenizer: TokenizerFile, markers: ReplyMarkers) -> int | None:
    """Return where reasoning begins: after a think block that nothing but white space precedes."""
    if markers.think_open is None or markers.think_open not in ids:
        return None
    opened = ids.index(markers.think_open)
    return None if tokenizer.decode(ids[:opened]).strip() else opened + 1


def _split_reasoning(
    ids: Sequence[int], start: int, markers: ReplyMarkers
) -> tuple[Sequence[int], Sequence[int]]:
    """Return (reasoning, rest).

    Reasoning ends at the first closing marker; where there is none, at the first call, which can only have
    been meant as one; where there is none either, it is everything.
    """
    if markers.think_close in ids[start:]:
        end = ids.index(markers.think_close, start)
        return ids[start:end], ids[end + 1 :]
    end = _find(ids, start, markers.call_open)
    return ids[start:end], ids[end:]


def _spans(ids: Sequence[int], markers: ReplyMarkers) -> Iterator[tuple[_Kind, Sequence[int]]]:
    """Yield text and calls in order, without their markers; a stray closing marker is text."""
    at = 0
    while at < len(ids):
        if ids[at] != markers.call_open:
            end = _find(ids, at, markers.call_open)
            yield _Kind.TEXT, ids[at:end]
            at = end
            continue
        end = _find(ids, at + 1, markers.call_open, markers.call_close)
        is_closed = end < len(ids) and ids[end] == markers.call_close
        yield (_Kind.CALL if is_closed else _Kind.UNCLOSED_CALL), ids[at + 1 : end]
        at = end + is_closed


def _find(ids: Sequence[int], start: int, *wanted: int) -> int:
    return next((at for at in range(start, len(ids)) if ids[at] in wanted), len(ids))
