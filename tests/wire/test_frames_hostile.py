"""Bytes from anyone: a tree or a WireError, soon, in bounded memory."""

import json
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from tests.wire.strategies import blob, entry, frame

from pilotage.errors import WireError
from pilotage.wire.chunks import ChunkKind, join_chunks, read_descriptor, split_frame
from pilotage.wire.frames import Tree, decode_frame, encode_frame, read_op

T = ["t", "a"]
U8 = entry("U8", [1], 0, 1)


def structure(text: str) -> bytes:
    return blob(json.dumps({"__metadata__": {"dss": text}}))


def tree_text(text: str) -> bytes:
    return structure('{"v": "DSSST1", "tree": ' + text + "}")


def with_entry(changed: object, data: bytes = b"\0") -> bytes:
    return frame(T, {"a": changed}, data)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes that state"),
    "too short": (b"\x01\0\0", "3 bytes that state"),
    "pickle": (pickle.dumps([1], protocol=4), "refused a pickle or zip"),
    "old pickle": (pickle.dumps({"a": list(range(100))}, protocol=2), "refused a pickle or zip"),
    "zip": (b"PK\x03\x04" + bytes(100), "refused a pickle or zip"),
    "header longer than the data": ((1000).to_bytes(8, "little") + b"{}", "state a JSON header of 1000"),
    "header of 2**64 - 1": (b"\xff" * 16, "state a JSON header"),
    "header of no bytes": (bytes(16), "header of 0"),
    "header over 64 MiB": (
        (64 * 2**20 + 1).to_bytes(8, "little") + b"{" + bytes(64 * 2**20 + 10),
        "at most 67108864",
    ),
    "header that is a list": (blob("[]      "), "JSON header"),
    "not UTF-8": ((8).to_bytes(8, "little") + b'{"\xff":1} ', "not UTF-8 at byte 10"),
    "not JSON": (blob('{"a": }'), "header is not valid JSON"),
    "duplicate entry": (blob('{"a":1,"b":2,"a":3}'), "key 'a' occurs twice"),
    "metadata that is no object": (blob('{"__metadata__":[]}'), "not an object of strings"),
    "metadata of a number": (blob('{"__metadata__":{"dss":1}}'), "not an object of strings"),
    "metadata as an array": (blob(json.dumps({"__metadata__": U8}), b"\0"), "not an object of strings"),
    "no metadata": (blob(json.dumps({"a": U8}), b"\0"), "without the DSSST1 structure"),
    "no structure": (blob('{"__metadata__":{"op":"{}"}}'), "without the DSSST1 structure"),
    "structure that is no JSON": (structure("{"), "structure is not valid JSON"),
    "structure that is a list": (structure("[]"), "not an object with 'v' and 'tree'"),
    "structure without tree": (structure('{"v": "DSSST1"}'), "not an object with"),
    "other version": (structure('{"v": "DSSST2", "tree": ["j", 1]}'), "version 'DSSST2'; this reads DSSST1"),
    "version of a list": (structure('{"v": [], "tree": ["j", 1]}'), r"version \[\]"),
    "duplicate key in a value": (tree_text('["j", {"x": 1, "x": 2}]'), "key 'x' occurs twice"),
    "NaN": (tree_text('["j", NaN]'), "NaN is not a JSON number"),
    "Infinity": (tree_text('["j", [-Infinity]]'), "-Infinity is not a JSON number"),
    "infinite by its exponent": (tree_text('["j", [1e999]]'), "is inf"),
    "lone surrogate": (tree_text('["j", "\\ud800"]'), "lone surrogate"),
    "lone surrogate in a dict key": (tree_text('["d", [["\\ud800", ["j", 1]]]]'), "lone surrogate"),
    "integer of 5,000 digits": (tree_text('["j", ' + "1" * 5000 + "]"), "structure is not valid JSON"),
    "unknown tag": (tree_text('["x", 1]'), "is not a DSSST1 node"),
    "node that is a string": (tree_text('"t"'), "is not a DSSST1 node"),
    "empty node": (tree_text("[]"), "is not a DSSST1 node"),
    "key of a number": (tree_text('["t", 1]'), "is not a DSSST1 node"),
    "children that are no list": (tree_text('["l", {}]'), "is not a DSSST1 node"),
    "node with more": (tree_text('["j", 1, 2]'), "is not a DSSST1 node"),
    "scalar with more": (
        frame(["t", "a", {"scalar": True, "x": 1}], {"a": U8}, b"\0"),
        "is not a DSSST1 node",
    ),
    "scalar that is false": (frame(["t", "a", {"scalar": False}], {"a": U8}, b"\0"), "is not a DSSST1 node"),
    "scalar of two": (frame([*T, {"scalar": True}], {"a": entry("U8", [2], 0, 2)}, b"\0\0"), "a scalar, but"),
    "pair of one": (tree_text('["d", [["a"]]]'), r"no \[key, node\] pair"),
    "pair with a number": (tree_text('["d", [[1, ["j", 1]]]]'), r"no \[key, node\] pair"),
    "pair twice": (tree_text('["d", [["a", ["j", 1]], ["a", ["j", 2]]]]'), "key of its own"),
    "node without array": (frame(T), "no array 'a' for a node"),
    "placeholder as an array": (
        frame(["t", "__dss_empty__"], {"__dss_empty__": U8}, b"\0"),
        "no array '__dss_empty__'",
    ),
    "array named twice": (frame(["l", [T, T]], {"a": U8}, b"\0"), "two nodes name it"),
    "array without node": (frame(["j", 1], {"a": U8}, b"\0"), "belongs to no node"),
    "entry of a number": (with_entry(1), "needs dtype, shape and two data_offsets"),
    "entry with more": (with_entry({**U8, "x": 1}), "needs dtype"),
    "three offsets": (with_entry({**U8, "data_offsets": [0, 1, 1]}), "needs dtype"),
    "unknown dtype": (with_entry(entry("F4", [2], 0, 1)), "dtype 'F4' is not one of"),
    "negative offset": (with_entry(entry("U8", [1], -1, 0)), "whole numbers"),
    "offset of a float": (with_entry({**U8, "data_offsets": [0.0, 1]}), "whole numbers"),
    "offset of true": (with_entry({**U8, "data_offsets": [0, True]}), "whole numbers"),
    "negative axis": (with_entry(entry("U8", [-1, -1], 0, 1)), "whole numbers"),
    "axis of true": (with_entry({**U8, "shape": [True]}), "whole numbers"),
    "too many axes": (with_entry(entry("U8", [1] * 33, 0, 1)), "at most 32"),
    "shape of 2**90": (with_entry(entry("U8", [2**30] * 3, 0, 1)), "too large"),
    "empty shape of 2**90": (with_entry(entry("U8", [0, *[2**30] * 3], 0, 0), b""), "too large"),
    "end before start": (with_entry(entry("U8", [1], 1, 0)), "its offsets span -1"),
    "shape and range differ": (with_entry(entry("F32", [1], 0, 1)), "takes 4 bytes, its offsets span 1"),
    "range past the data": (with_entry(entry("U8", [2], 0, 2)), "take 2 bytes, but 1 follow"),
    "data past the ranges": (with_entry(U8, b"\0\0"), "take 1 bytes, but 2 follow"),
    "gap": (
        frame(["l", [T, ["t", "b"]]], {"a": U8, "b": entry("U8", [1], 2, 3)}, bytes(3)),
        "'b' starts at 2: it leaves a gap after byte 1",
    ),
    "overlap": (
        frame(["l", [T, ["t", "b"]]], {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)),
        "'b' starts at 1: it overlaps byte 2",
    ),
    "boolean of 2": (with_entry(entry("BOOL", [1], 0, 1), b"\x02"), "other than 0 and 1"),
    "deep nodes": (tree_text('["l", [' * 65 + '["j", 1]' + "]]" * 65), "nested deeper than 64"),
    "deep value": (tree_text('["j", ' + "[" * 65 + "]" * 65 + "]"), "nested deeper than 64"),
    "deep value under nodes": (
        tree_text('["l", [' * 40 + '["j", ' + "[" * 25 + "]" * 25 + "]" + "]]" * 40),
        "nested deeper than 64",
    ),
    "value of 100,000 levels": (tree_text('["j", ' + "[" * 100_000 + "]" * 100_000 + "]"), "valid JSON"),
    "header of 100,000 levels": (blob('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "valid JSON"),
    "2 million lists": (tree_text('["j", [' + "[]," * 2_000_000 + "[]]]"), "more than 2000000 lists"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_refused_in_one_clear_line(name: str) -> None:
    data, message = MALFORMED[name]
    with pytest.raises(WireError, match=message) as caught:
        decode_frame(data)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_header_of_640_bytes_is_not_taken_for_a_pickle() -> None:
    # 640 is 0x0280, so the frame begins with the bytes of a pickle of protocol 2.
    sizes = {len(encode_frame("x" * length)): length for length in range(480, 520)}
    written = encode_frame("x" * sizes[640 + 8 + 1])
    assert written[:2] == b"\x80\x02"
    assert decode_frame(written) == "x" * sizes[649]


@pytest.mark.parametrize(
    ("op", "message"),
    [("[]", "op is not a JSON object"), ("{", "op is not valid JSON"), ('{"a":1e999}', "inf")],
)
def test_malformed_operation_metadata_is_refused(op: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_op(frame(["j", 1], op=op))


def test_a_long_key_over_many_values_is_read_in_linear_time() -> None:
    # Building a path for each value would copy 1 MB 200,000 times: minutes instead of under a second.
    written = encode_frame({"k" * 1_000_000: ["x"] * 200_000})
    started = time.process_time()
    decode_frame(written)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("unit", ["[],", "{},", '{"a":1},', "[1],", "0.5,", '"ab",'])
def test_decoded_values_take_a_small_multiple_of_their_text(unit: str) -> None:
    written = tree_text('["j", [' + unit * 10_000 + "0]]")
    tracemalloc.start()
    decode_frame(written)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * len(written)


def fuzz_targets() -> list[bytes]:
    tree: Tree = {
        "args": (),
        "kwargs": {"input_ids": np.arange(6).reshape(2, 3), "temperature": np.array(0.5, np.float32)},
        "context": [np.array([[True, False]]), {"text": "caf\u00e9", "n": [1, 2.5, None]}],
    }
    whole = encode_frame(tree, op={"response_options": {"format": "dssst1"}})
    chunk = split_frame(whole, kind=ChunkKind.REQUEST, operation="fwd-bwd", force=True)[0]
    return [whole, encode_frame([1, {"a": "b"}]), chunk]


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, insert or repeat a few bytes; half of the time within the header alone."""
    changed = bytearray(data)
    header_end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.integers(1, 4)):
        limit = min(header_end, len(changed)) if rng.random() < 0.5 else len(changed)
        place = int(rng.integers(max(limit, 1)))
        match int(rng.integers(5)):
            case 0:
                changed[place : place + 1] = bytes([int(rng.integers(256))])
            case 1:
                changed = changed[:place]
            case 2:
                del changed[place : place + int(rng.integers(1, 9))]
            case 3:
                source = int(rng.integers(max(limit, 1)))
                changed[place:place] = changed[source : source + int(rng.integers(1, 30))]
            case _:
                token = [b"[", b"]", b"{", b"}", b'"', b"\\", b",", b"9", b"-1", b"null", b"1e999", b"\xff"]
                changed[place : place + 1] = token[rng.integers(len(token))]
    if rng.random() < 0.5:  # state the header's size so that the change is reached
        shift = len(changed) - len(data)
        changed[:8] = max(header_end - 8 + shift, 0).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.timeout(120)
def test_mutated_frames_end_in_a_tree_or_a_wire_error_within_50_ms_each() -> None:
    rng = np.random.default_rng(3)
    refused, slowest = 0, 0.0
    for data in fuzz_targets():
        for _ in range(1500):
            changed = mutate(data, rng)
            started = time.process_time()
            refused += not _survives(changed)
            slowest = max(slowest, time.process_time() - started)
    assert slowest < 0.05
    assert 2250 < refused < 4500  # most changes matter, and some do not


def _survives(data: bytes) -> bool:
    """Return whether the bytes are still a frame; any error but WireError fails the test."""
    survived = True
    for read in (decode_frame, read_op, read_descriptor, _join_one):
        try:
            read(data)
        except WireError:
            survived = False
    return survived


def _join_one(data: bytes) -> bytes:
    return join_chunks([data], ChunkKind.REQUEST)


def test_every_truncation_of_a_frame_is_refused() -> None:
    for data in fuzz_targets():
        for size in range(len(data)):
            with pytest.raises(WireError):
                decode_frame(data[:size])
