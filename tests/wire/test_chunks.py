"""Chunks: what is split comes back, and only from a complete group of one frame."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import blob

from pilotage.errors import WireError
from pilotage.wire.chunks import (
    CHUNK_OVERHEAD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_NAME_LENGTH,
    ChunkDescriptor,
    ChunkKind,
    join_chunks,
    read_descriptor,
    split_frame,
)
from pilotage.wire.frames import decode_frame, encode_frame

REQUEST, RESULT = ChunkKind.REQUEST, ChunkKind.RESULT
FRAME = encode_frame({"a": np.arange(3000)})  # a little over 24,000 bytes
LIMIT = CHUNK_OVERHEAD_BYTES + 10_000  # 10,000 bytes of payload: three chunks


def split(frame: bytes = FRAME, *, group_id: str = "g") -> list[bytes]:
    return split_frame(frame, kind=REQUEST, operation="fwd-bwd", max_bytes=LIMIT, group_id=group_id)


def test_a_chunk_is_written_as_the_format_says() -> None:
    [chunk] = split_frame(b"frame", kind=REQUEST, operation="generate", group_id="g", force=True)

    sha256 = hashlib.sha256(b"frame").hexdigest()
    dss = json.dumps('{"v": "DSSST1", "tree": ["d", [["payload", ["t", "payload"]]]]}')
    op = json.dumps(
        '{"request_chunk": {"chunk_idx": 0, "total_chunks": 1, "frame_sha256": "' + sha256 + '",'
        ' "frame_size_bytes": 5, "chunk_group_id": "g", "operation": "generate"}}'
    )
    entry = '"payload":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}'
    assert chunk == blob('{"__metadata__":{"dss":' + dss + ',"op":' + op + "}," + entry + "}", b"frame")


def test_a_frame_is_split_into_ranges_that_describe_themselves() -> None:
    chunks = split()

    assert len(chunks) == 3
    assert all(len(chunk) <= LIMIT for chunk in chunks)
    sha256 = hashlib.sha256(FRAME).hexdigest()
    assert [read_descriptor(chunk) for chunk in chunks] == [
        ChunkDescriptor(
            kind=REQUEST,
            chunk_idx=index,
            total_chunks=3,
            frame_sha256=sha256,
            frame_size_bytes=len(FRAME),
            chunk_group_id="g",
            operation="fwd-bwd",
        )
        for index in range(3)
    ]


def test_a_result_chunk_has_neither_group_nor_operation() -> None:
    chunks = split_frame(FRAME, kind=RESULT, max_bytes=LIMIT)
    descriptor = read_descriptor(chunks[2])
    assert descriptor is not None
    assert (descriptor.kind, descriptor.chunk_idx) == (RESULT, 2)
    assert descriptor.chunk_group_id is descriptor.operation is None
    assert join_chunks(chunks, RESULT) == FRAME


@given(st.binary(max_size=60_000), st.integers(CHUNK_OVERHEAD_BYTES + 5000, 80_000), st.randoms())
def test_any_bytes_come_back_from_chunks_in_any_order(data: bytes, limit: int, shuffle: st.DrawFn) -> None:
    chunks = split_frame(data, kind=REQUEST, max_bytes=limit, force=True)
    shuffle.shuffle(chunks)  # pyright: ignore
    assert all(len(chunk) <= limit for chunk in chunks)
    assert join_chunks(chunks, REQUEST) == data


def test_a_frame_that_fits_is_sent_as_it_is_unless_chunks_are_demanded() -> None:
    assert split_frame(FRAME, kind=REQUEST) == [FRAME]
    assert split_frame(FRAME, kind=REQUEST, max_bytes=len(FRAME)) == [FRAME]
    assert read_descriptor(FRAME) is None
    assert join_chunks([FRAME], REQUEST) == FRAME
    [only] = split_frame(FRAME, kind=REQUEST, force=True)
    assert read_descriptor(only) is not None
    assert join_chunks([bytearray(only)], REQUEST) == FRAME


def test_an_empty_frame_has_one_chunk() -> None:
    [only] = split_frame(b"", kind=RESULT, force=True)
    assert join_chunks([only], RESULT) == b""


def test_each_request_has_a_group_of_its_own() -> None:
    groups = {
        descriptor.chunk_group_id
        for _ in range(3)
        for chunk in split_frame(FRAME, kind=REQUEST, max_bytes=LIMIT)
        if (descriptor := read_descriptor(chunk))
    }
    assert len(groups) == 3
    assert all(group and len(group) == 36 for group in groups)


def test_the_longest_names_leave_a_chunk_within_its_limit() -> None:
    name = "\u00e9" * MAX_NAME_LENGTH  # six bytes each in JSON, seven in the header
    limit = CHUNK_OVERHEAD_BYTES + 1000
    chunks = split_frame(bytes(10_000), kind=REQUEST, operation=name, group_id=name, max_bytes=limit)
    assert max(len(chunk) for chunk in chunks) <= limit
    assert MAX_CHUNK_BYTES == 60 * 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": REQUEST, "max_bytes": CHUNK_OVERHEAD_BYTES}, "max_bytes is 8192; a chunk needs more"),
        ({"kind": RESULT, "operation": "generate"}, "belong to requests"),
        ({"kind": RESULT, "group_id": "g"}, "belong to requests"),
        ({"kind": REQUEST, "group_id": "", "force": True}, "1 to 256 characters"),
        ({"kind": REQUEST, "operation": "x" * 257, "force": True}, "1 to 256 characters"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        split_frame(FRAME, **arguments)  # pyright: ignore[reportArgumentType]


DESCRIPTOR: dict[str, object] = {
    "chunk_idx": 0,
    "total_chunks": 1,
    "frame_sha256": hashlib.sha256(b"frame").hexdigest(),
    "frame_size_bytes": 5,
    "chunk_group_id": "g",
    "operation": "fwd-bwd",
}


def chunk_of(payload: object = None, **changes: object) -> bytes:
    tree = {"payload": np.frombuffer(b"frame", np.uint8)} if payload is None else payload
    fields = {key: value for key, value in {**DESCRIPTOR, **changes}.items() if value is not ...}
    return encode_frame(tree, op={"request_chunk": fields})  # pyright: ignore[reportArgumentType]


def test_the_hand_made_chunk_of_these_tests_is_a_good_one() -> None:
    assert join_chunks([chunk_of()], REQUEST) == b"frame"
    assert join_chunks([chunk_of(chunk_group_id=..., operation=None)], REQUEST) == b"frame"
    assert join_chunks([chunk_of(a_field_of_tomorrow=1)], REQUEST) == b"frame"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_idx": ...}, "needs the integers"),
        ({"chunk_idx": "0"}, "needs the integers"),
        ({"chunk_idx": True}, "must be integers"),
        ({"chunk_idx": 1}, "chunk_idx 1 is not below total_chunks 1"),
        ({"chunk_idx": -1}, "chunk_idx -1 is not below"),
        ({"total_chunks": 0}, "not below total_chunks 0"),
        ({"frame_size_bytes": -1}, "frame_size_bytes is -1"),
        ({"frame_size_bytes": 5.0}, "needs the integers"),
        ({"frame_sha256": "x"}, "64 lower-case hex digits"),
        ({"chunk_group_id": 1}, "are strings"),
        ({"operation": []}, "are strings"),
        ({"operation": ""}, "1 to 256 characters"),
    ],
)
def test_a_malformed_descriptor_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_descriptor(chunk_of(**changes))


def test_a_chunk_of_both_kinds_is_refused() -> None:
    both = encode_frame(None, op={"request_chunk": {}, "result_chunk": {}})
    with pytest.raises(WireError, match="not both"):
        read_descriptor(both)


def changed(chunks: list[bytes], place: int, byte: int) -> list[bytes]:
    """Flip one payload byte of one chunk."""
    flipped = bytearray(chunks[place])
    flipped[byte] ^= 1
    return [*chunks[:place], bytes(flipped), *chunks[place + 1 :]]


OTHER = encode_frame({"a": np.arange(1, 3001)})  # of the same size
SHORT = encode_frame({"a": np.arange(2400)})  # two chunks
INCOMPLETE: dict[str, tuple[list[bytes], str]] = {
    "none": ([], "no chunks"),
    "one missing": (split()[:2], "2 of 3 chunks are there"),
    "one twice": ([*split()[:2], split()[1]], "chunk 1 is there twice"),
    "one too many": ([*split(), split()[0]], "chunk 0 is there twice"),
    "one of another frame": ([*split()[:2], split(OTHER)[2]], "another frame or group"),
    "one of a shorter frame": ([*split()[:2], split(SHORT)[1]], "another frame or group"),
    "one of another group": ([*split()[:2], split(group_id="h")[2]], "another frame or group"),
    "one that is no chunk": ([*split()[:2], encode_frame(None)], "no chunk is among"),
    "the first is no chunk": ([encode_frame(None), *split()[:2]], "no chunk is among"),
    "results": (split_frame(FRAME, kind=RESULT, max_bytes=LIMIT), "a result chunk is among request chunks"),
    "one byte changed": (changed(split(), 1, -1), "SHA-256 is not the one stated"),
    "other size": ([chunk_of(frame_size_bytes=6)], "has 5 bytes, not 6"),
    "no payload": ([chunk_of({"x": 1})], "holds one array, 'payload'"),
    "payload and more": (
        [chunk_of({"payload": np.zeros(5, np.uint8), "x": 1})],
        "holds one array, 'payload'",
    ),
    "payload of int8": ([chunk_of({"payload": np.zeros(5, np.int8)})], r"is uint8 \[n\], not int8"),
    "payload of two axes": (
        [chunk_of({"payload": np.zeros((1, 5), np.uint8)})],
        r"shape \(1, 5\)",
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_chunks_that_are_not_one_whole_frame_are_refused(name: str) -> None:
    chunks, message = INCOMPLETE[name]
    with pytest.raises(WireError, match=message):
        join_chunks(chunks, REQUEST)


def test_a_joined_frame_decodes() -> None:
    tree = decode_frame(join_chunks(split(), REQUEST))
    assert isinstance(tree, dict)
    assert np.array_equal(tree["a"], np.arange(3000))  # pyright: ignore[reportArgumentType]
