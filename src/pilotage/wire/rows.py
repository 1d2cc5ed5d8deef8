"""The rows of the stock dialect: sequences padded to [B, S], or packed into [1, T] with `cu_seqlens`.

Two conventions meet here. On the wire, entry i of a per-token array speaks of token i + 1 (it stands where
the model predicts that token); in a `Sample`, entry i speaks of token i. `Rows` cuts rows into sequences
and moves entries between both; nothing else in the package knows of the shift.

    wire, S = 5, 4 tokens    input_ids  7  8  9  4  pad     loss_mask  0  1  1  0  0
    sample                   token_ids  7  8  9  4          loss_mask  F  F  T  T
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotage.types import Logprobs, TokenIds
from pilotage.wire.fields import Array, Fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLayout:
    """Where the sequences lie in an array of `shape`, flattened row by row. Rows without a token are none."""

    shape: tuple[int, int]
    """[B, S], or [1, T] where sequences are packed."""
    starts: NDArray[np.int64]
    """[R] flat index of each sequence's first token."""
    lengths: NDArray[np.int64]
    """[R]"""
    is_packed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Token ids with their layout, and how to cut other arrays of the same layout."""

    layout: BatchLayout
    ids: TokenIds
    """[B x S] flat, 0 where there is no token."""
    is_token: NDArray[np.bool_]
    """[B x S] flat."""

    def cut[T: np.generic](self, flat: NDArray[T]) -> list[NDArray[T]]:
        """Return [L] of each sequence, entries as they stand."""
        places = zip(self.layout.starts, self.layout.lengths, strict=True)
        return [flat[start : start + length] for start, length in places]

    def unshift[T: np.generic](self, flat: NDArray[T]) -> list[NDArray[T]]:
        """Return [L] of each sequence with entry i moved to i + 1; entry 0 is 0."""
        return [np.concatenate([np.zeros(1, flat.dtype), part[:-1]]) for part in self.cut(flat)]

    def next_ids(self) -> NDArray[np.int32]:
        """Return [B x S] the id after each token of the same sequence; -1 where there is none."""
        flat = np.full(self.ids.size, -1, np.int32)
        for start, length in zip(self.layout.starts, self.layout.lengths, strict=True):
            flat[start : start + length - 1] = self.ids[start + 1 : start + length]
        return flat


def read_token_rows(kwargs: Fields, context: Fields) -> Rows:
    """Read the model's inputs.

    Raises:
        InvalidBodyError: no usable ids, rows that are not left-aligned, or positions other than 0, 1, 2, ...
            of each sequence.
    """
    ids = matrix(kwargs, "input_ids", "iu")
    if ids is None:
        kwargs.fail("input_ids", "missing")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        kwargs.fail("input_ids", f"token ids lie in 0..2**31 - 1, got {ids.min()}..{ids.max()}")
    layout = _packed(context, ids.shape) if context.get("cu_seqlens") is not None else None
    attention = matrix(kwargs, "attention_mask", "iubf", ids.shape)
    if layout is None:
        layout = _padded(kwargs, ids.shape, attention)
    elif attention is not None and not (attention == 1).all():
        kwargs.fail("attention_mask", "packed rows hold no padding; leave it out")
    is_token = np.zeros(ids.size, np.bool_)
    for start, length in zip(layout.starts, layout.lengths, strict=True):
        is_token[start : start + length] = True
    rows = Rows(layout=layout, ids=np.where(is_token, ids.reshape(-1), 0).astype(np.int32), is_token=is_token)
    _check_same_ids(rows, context)
    _check_positions(rows, kwargs)
    return rows


def to_rows(layout: BatchLayout, logprobs: Sequence[Logprobs]) -> NDArray[np.float32]:
    """Put the log-probs of samples back into rows.

    Args:
        logprobs: for each sequence of the layout [L], entry i of token i.

    Returns:
        [B, S] (or [1, T]), entry i of token i + 1; 0 at the last token and where there is none.
    """
    flat = np.zeros(layout.shape[0] * layout.shape[1], np.float32)
    for start, length, values in zip(layout.starts, layout.lengths, logprobs, strict=True):
        flat[start : start + length - 1] = values[1:]
    return flat.reshape(layout.shape)


def matrix(fields: Fields, key: str, kinds: str, shape: tuple[int, ...] | None = None) -> NDArray[Any] | None:
    """Return a [B, S] array, [T] taken as [1, T]; None where the key is absent.

    Args:
        kinds: numpy's letters of the dtypes that are taken; "f" includes bfloat16.
        shape: of the ids, which it must have.

    Raises:
        InvalidBodyError: it is no such array.
    """
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.ndim not in (1, 2):
        fields.fail(key, "expected an array [B, S], or [1, T] where sequences are packed")
    array: Array = value.astype(np.float32) if value.dtype.name == "bfloat16" else value
    if array.dtype.kind not in kinds:
        fields.fail(key, f"dtype {array.dtype} cannot be read here")
    array = array.reshape(1, -1) if array.ndim == 1 else array
    if shape is not None and array.shape != shape:
        fields.fail(key, f"has shape {list(array.shape)}, input_ids {list(shape)}")
    return array


def _padded(kwargs: Fields, shape: tuple[int, ...], attention: Array | None) -> BatchLayout:
    num_rows, width = shape
    lengths = np.full(num_rows, width, np.int64)
    if attention is not None:
        is_token = attention != 0
        lengths = is_token.sum(axis=1, dtype=np.int64)
        is_left = (np.arange(width) < lengths[:, None]) == is_token
        if not is_left.all():
            row = int(np.argmin(is_left.all(axis=1)))
            kwargs.fail(
                f"attention_mask.{row}",
                "its tokens are not the leading columns; move them left, with the padding at the tail, in"
                " every per-token array",
            )
    has_tokens = lengths > 0
    starts = np.arange(num_rows, dtype=np.int64) * width
    return BatchLayout(
        shape=(num_rows, width), starts=starts[has_tokens], lengths=lengths[has_tokens], is_packed=False
    )


def _packed(context: Fields, shape: tuple[int, ...]) -> BatchLayout:
    bounds = context.get("cu_seqlens")
    if not isinstance(bounds, np.ndarray) or bounds.ndim != 1 or bounds.dtype.kind != "i":
        context.fail("cu_seqlens", "expected a one-dimensional array of signed integers")
    steps = np.diff(bounds.astype(np.int64))
    if shape[0] != 1 or bounds.size < 2 or bounds[0] != 0 or bounds[-1] != shape[1] or (steps < 1).any():
        context.fail(
            "cu_seqlens",
            f"boundaries rise from 0 to T = {shape[1]} over rows [1, T]; got {bounds.tolist()[:8]} over"
            f" {list(shape)}",
        )
    starts = bounds[:-1].astype(np.int64)
    return BatchLayout(shape=(1, shape[1]), starts=starts, lengths=steps, is_packed=True)


def _check_same_ids(rows: Rows, context: Fields) -> None:
    ids = matrix(context, "input_ids", "iu", rows.layout.shape)
    if ids is not None and not (ids.reshape(-1) == rows.ids)[rows.is_token].all():
        context.fail("input_ids", "differ from kwargs.input_ids")


def _check_positions(rows: Rows, kwargs: Fields) -> None:
    positions = matrix(kwargs, "position_ids", "iu", rows.layout.shape)
    if positions is None:
        return
    for part in rows.cut(positions.reshape(-1)):
        if not (part == np.arange(part.size)).all():
            kwargs.fail("position_ids", "positions of each sequence are 0, 1, 2, ...; leave them out")
