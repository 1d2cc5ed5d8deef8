"""The safetensors container on numpy: named arrays and string metadata in one run of bytes.

    | u64 header size | JSON header, padded with spaces to 8 bytes | array bytes, no gaps |

Invariant: what this module reads is fully checked before an array exists, and every array is a read-only
view of the input. It writes byte for byte what the safetensors package (0.8) writes, except that `metadata`
keeps the caller's order (the package's own order differs from process to process).

bfloat16 and float8 arrays have the dtypes of `ml_dtypes` (1.7 MB, no dependency but numpy), so that they are
ordinary arrays: `.astype(np.float32)` works. The sub-byte kinds (F4, F6) are refused, because torch and numpy
have no common layout for them.

It does not know what the arrays mean; `frames` does.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
import orjson
from numpy.typing import NDArray

from pilotage.errors import WireError

type Array = NDArray[Any]
type Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_CONTAINERS = 2_000_000
"""Lists and dicts in one JSON text. An empty one takes 3 bytes of text and some 70 of memory."""
MAX_DIMENSIONS = 32
MAX_ARRAY_BYTES = 2**62  # with an empty axis the others may be as long as they like; numpy's limit is 2**63
METADATA_KEY = "__metadata__"

DTYPES: dict[str, np.dtype[Any]] = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F32": np.dtype(np.float32),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Name on the wire to dtype, in the order in which arrays are written: widest first keeps all aligned."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {name: rank for rank, name in enumerate(DTYPES)}
_PICKLE_SIGNATURES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_ZIP_SIGNATURE = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A parsed header, its array entries not yet checked."""

    metadata: dict[str, str]
    entries: dict[str, object]
    """Array name to its raw JSON entry."""
    size_bytes: int
    """Where the array bytes start in the blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


def write_blob(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Return `arrays` and `metadata` as one blob, copying each array once.

    Raises:
        WireError: a dtype that the container cannot hold, or a header over `MAX_HEADER_BYTES`.
    """
    named = sorted(
        ((_dtype_name(key, array), key, array) for key, array in arrays.items()),
        key=lambda item: (_RANKS[item[0]], item[1]),
    )
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    parts: list[bytes | memoryview] = [b"", b""]
    offset = 0
    for name, key, array in named:
        end = offset + array.nbytes
        header[key] = {"dtype": name, "shape": list(array.shape), "data_offsets": [offset, end]}
        contiguous = np.ascontiguousarray(array, dtype=DTYPES[name])  # little-endian, as DTYPES is
        parts.append(contiguous.reshape(-1).view(np.uint8).data)
        offset = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(
            f"the header would take {len(text)} bytes, the limit is {MAX_HEADER_BYTES};"
            " send long lists of numbers as arrays"
        )
    parts[:2] = [len(text).to_bytes(8, "little"), text]
    return b"".join(parts)


def _dtype_name(key: str, array: Array) -> str:
    name = _NAMES.get(array.dtype.newbyteorder("="))
    if name is None:
        raise WireError(f"array {key!r} has dtype {array.dtype}; the wire holds {', '.join(DTYPES)}")
    return name


def read_header(data: Buffer) -> Header:
    """Parse the header of a blob; the array bytes are not looked at.

    Raises:
        WireError: not a blob, a header longer than the data or `MAX_HEADER_BYTES`, or bad JSON.
    """
    view = memoryview(data).cast("B")
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= size <= min(len(view) - 8, MAX_HEADER_BYTES) or view[8] != ord("{"):
        raise WireError(_not_a_blob(view, size))
    try:
        text = str(view[8 : 8 + size], "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"the header is not UTF-8 at byte {8 + error.start}") from error
    entries = parse_json(text, "the header")
    assert isinstance(entries, dict)  # it begins with "{"
    metadata = entries.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WireError(f"{METADATA_KEY} in the header is not an object of strings")
    return Header(metadata=cast(dict[str, str], metadata), entries=entries, size_bytes=8 + size)


def _not_a_blob(view: memoryview, size: int) -> str:
    """Say why; called only after the length failed, because 640 bytes of header begin like a pickle."""
    if bytes(view[:2]) in _PICKLE_SIGNATURES or bytes(view[:4]) == _ZIP_SIGNATURE:
        return "refused a pickle or zip (torch.save) payload; send a DSSST1 frame (safetensors)"
    return (
        f"not a DSSST1 frame: {len(view)} bytes that state a JSON header of {size} bytes"
        f" (at most {MAX_HEADER_BYTES}) after the first 8"
    )


def read_arrays(data: Buffer, header: Header) -> dict[str, Array]:
    """Return the blob's arrays, read-only; views of `data` where it is aligned, else copies.

    Whoever passes a bytearray must not write to it while an array lives.

    Raises:
        WireError: an entry is malformed, or the entries do not cover the data exactly once.
    """
    stored = np.frombuffer(memoryview(data).toreadonly(), np.uint8)[header.size_bytes :]
    entries = [_check_entry(key, raw) for key, raw in header.entries.items()]
    _check_coverage(entries, stored.size)
    return {entry.key: _array(stored, entry) for entry in entries}


def _check_entry(key: str, raw: object) -> _Entry:
    where = f"array {reprlib.repr(key)}"
    match raw:
        case {"dtype": str(name), "shape": list(shape), "data_offsets": [start, end], **rest} if not rest:
            pass
        case _:
            raise WireError(f"{where} needs dtype, shape and two data_offsets, got {reprlib.repr(raw)}")
    if name not in DTYPES:
        raise WireError(f"{where}: dtype {reprlib.repr(name)} is not one of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or not all(_is_size(length) for length in (*shape, start, end)):
        raise WireError(
            f"{where}: shape {reprlib.repr(shape)} and offsets {reprlib.repr([start, end])} must be whole"
            f" numbers from 0 to 2**62, at most {MAX_DIMENSIONS} of them in the shape"
        )
    entry = _Entry(key=key, dtype=DTYPES[name], shape=tuple(cast(list[int], shape)), start=start, end=end)
    if end - start != _size_bytes(entry):
        raise WireError(
            f"{where}: {name} of shape {reprlib.repr(shape)} takes {_size_bytes(entry)} bytes,"
            f" its offsets span {end - start}"
        )
    return entry


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ARRAY_BYTES


def _size_bytes(entry: _Entry) -> int:
    """Return shape x item size; 0 with an empty axis, if numpy can hold such a shape."""
    size = entry.dtype.itemsize
    for length in entry.shape:
        size *= max(length, 1)
    if size > MAX_ARRAY_BYTES:
        raise WireError(f"array {reprlib.repr(entry.key)}: shape {reprlib.repr(entry.shape)} is too large")
    return 0 if 0 in entry.shape else size


def _check_coverage(entries: list[_Entry], stored_bytes: int) -> None:
    covered = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != covered:
            kind = "leaves a gap after" if entry.start > covered else "overlaps"
            raise WireError(
                f"array {reprlib.repr(entry.key)} starts at {entry.start}: it {kind} byte {covered}"
            )
        covered = entry.end
    if covered != stored_bytes:
        raise WireError(f"the arrays take {covered} bytes, but {stored_bytes} follow the header")


def _array(stored: NDArray[np.uint8], entry: _Entry) -> Array:
    raw = stored[entry.start : entry.end]
    if entry.dtype == np.bool_ and raw.size and raw.max() > 1:
        raise WireError(f"array {reprlib.repr(entry.key)}: BOOL holds a byte other than 0 and 1")
    array = raw.view(entry.dtype).reshape(entry.shape)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def parse_json(text: str, what: str) -> object:
    """Parse strict JSON: no key twice in an object, no NaN or Infinity, a bounded number of containers.

    Python's parser, not orjson: that one keeps the last of two equal keys and rounds integers over 64 bits.

    Raises:
        WireError: `what` and why not.
    """
    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise WireError(f"{what} has more than {MAX_CONTAINERS} lists and objects; send numbers as arrays")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what} is not valid JSON: {error}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"the key {_first_repeated(key for key, _ in pairs)} occurs twice")
    return made


def _first_repeated(keys: Iterator[str]) -> str:
    seen: set[str] = set()
    return next(reprlib.repr(key) for key in keys if key in seen or seen.add(key))


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
