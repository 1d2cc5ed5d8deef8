"""Random trees, arrays of every dtype and layout, and frames put together by hand."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.wire.stock_peer import describe

from pilotage.wire.blob import DTYPES, Array
from pilotage.wire.frames import TreeLike

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (0,), (2, 3), (3, 0, 2), (2, 1, 4))
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def random_array(rng: np.random.Generator, name: str) -> Array:
    """Return an array of one dtype with random bits, of a random shape and layout."""
    shape = SHAPES[rng.integers(len(SHAPES))]
    layout = rng.integers(4)
    base = shape if layout == 0 else tuple(2 * length for length in shape)
    count = int(np.prod(base, dtype=np.int64)) * DTYPES[name].itemsize
    raw = rng.integers(0, 2 if name == "BOOL" else 256, count, dtype=np.uint8)
    array = raw.view(DTYPES[name]).reshape(base)
    if layout and shape:
        array = array[tuple(slice(None, None, 2) for _ in shape)]  # every other element: not contiguous
    if layout == 2:
        array = array.T
    if layout == 3:
        array = array.astype(array.dtype.newbyteorder(">"))
    return array


def arrays() -> st.SearchStrategy[Array]:
    return st.builds(
        random_array, st.integers(0, 2**32).map(np.random.default_rng), st.sampled_from(list(DTYPES))
    )


KEYS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6)
"""Without dots, so that no two paths collide, and never one of the format's own names (eight letters up)."""

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def trees(draw: st.DrawFn) -> TreeLike:
    """Draw a tree; some arrays occur twice, or as a part of another."""
    array = draw(arrays())
    shared = [array, array, array[1:] if array.ndim else array]
    leaves = SCALARS | TEXTS | arrays() | st.sampled_from(shared)
    return draw(st.recursive(leaves, _containers, max_leaves=8))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tuples = st.lists(inner, max_size=4).map(tuple)
    return st.lists(inner, max_size=4) | tuples | st.dictionaries(KEYS, inner, max_size=4)


def described(tree: TreeLike) -> object:
    """Return everything that a frame must keep of `tree`, as something that `==` compares."""
    return describe(tree, lambda value: _array(value) if isinstance(value, np.ndarray) else None)


def _array(array: Array) -> list[object]:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return [NAMES[native.dtype], list(native.shape), native.tobytes().hex()]


def blob(header: str, data: bytes = b"") -> bytes:
    """Return a safetensors blob of exactly this header, padded."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def frame(
    tree: object, entries: Mapping[str, object] | None = None, data: bytes = b"", **changes: object
) -> bytes:
    """Return a frame of this node and these raw header entries; `changes` replace parts of the metadata."""
    metadata: dict[str, object] = {"dss": json.dumps({"v": "DSSST1", "tree": tree}), **changes}
    return blob(json.dumps({"__metadata__": metadata, **(entries or {})}), data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
