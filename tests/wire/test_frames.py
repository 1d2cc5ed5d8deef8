"""Frames: golden bytes, the round trip, and what cannot be held."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from tests.wire.strategies import NAMES, arrays, blob, described, entry, frame, random_array, trees

from pilotage.errors import PilotageError, WireError
from pilotage.wire.blob import DTYPES, Array
from pilotage.wire.frames import MAX_DEPTH, TreeLike, decode_frame, encode_frame, read_op

ONE = np.array([1, -1], np.int32)
ONE_BYTES = b"\x01\0\0\0\xff\xff\xff\xff"


def golden(tree: str, entries: str, data: bytes, *, op: str = "") -> bytes:
    """Put a frame together from texts as they stand in it; quotes inside the two JSON texts are escaped."""
    dss = ('{"v": "DSSST1", "tree": ' + tree + "}").replace('"', '\\"')
    metadata = f'"dss":"{dss}"' + (',"op":"' + op.replace('"', '\\"') + '"' if op else "")
    return blob('{"__metadata__":{' + metadata + "}," + entries + "}", data)


EMPTY = '"__dss_empty__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
GOLDEN: dict[str, tuple[TreeLike, bytes]] = {
    "array": (
        ONE,
        golden('["t", "__root__"]', '"__root__":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}', ONE_BYTES),
    ),
    "scalar": (
        {"a": np.array(1.0, np.float32)},
        golden(
            '["d", [["a", ["t", "a", {"scalar": true}]]]]',
            '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',
            b"\0\0\x80\x3f",
        ),
    ),
    "json": (
        {"a": [1, 2.5, None, True, "x"]},
        golden('["j", {"a": [1, 2.5, null, true, "x"]}]', EMPTY, b"\0"),
    ),
    "tuple": ((1, ()), golden('["u", [["j", 1], ["u", []]]]', EMPTY, b"\0")),
    "dict and list": (
        {"a": [ONE, {"b": 1}], "c": {"d": (np.array([3], np.uint8),)}},
        golden(
            '["d", [["a", ["l", [["t", "a.0"], ["j", {"b": 1}]]]],'
            ' ["c", ["d", [["d", ["u", [["t", "c.d.0"]]]]]]]]]',
            '"a.0":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
            '"c.d.0":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}',
            ONE_BYTES + b"\x03",
        ),
    ),
    # Widest first, then by name: float64 before bfloat16 before bool, "y" before "z".
    "order": (
        [{"z": np.array([True]), "y": np.array([False])}, np.array([1.0], ml_dtypes.bfloat16), np.zeros(1)],
        golden(
            '["l", [["d", [["z", ["t", "0.z"]], ["y", ["t", "0.y"]]]], ["t", "1"], ["t", "2"]]]',
            '"2":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},'
            '"1":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]},'
            '"0.y":{"dtype":"BOOL","shape":[1],"data_offsets":[10,11]},'
            '"0.z":{"dtype":"BOOL","shape":[1],"data_offsets":[11,12]}',
            b"\0\0\0\0\0\0\0\0" + b"\x80\x3f" + b"\0\x01",
        ),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tree_is_written_as_the_format_says_and_read_back(name: str) -> None:
    tree, expected = GOLDEN[name]
    assert encode_frame(tree) == expected
    assert described(decode_frame(expected)) == described(tree)


def test_a_whole_frame_byte_by_byte() -> None:
    header = b'{"__metadata__":{"dss":"{\\"v\\": \\"DSSST1\\", \\"tree\\": [\\"j\\", null]}"},'
    header += b'"__dss_empty__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    # 71 + 64 = 135 bytes, padded to the next multiple of 8: 136 = 0x88.
    assert encode_frame(None) == b"\x88\0\0\0\0\0\0\0" + header + b" " + b"\0"


def test_operation_metadata_is_written_after_the_tree_and_read_without_the_arrays() -> None:
    op = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    written = encode_frame(ONE, op=op)
    assert written == golden(
        '["t", "__root__"]',
        '"__root__":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}',
        ONE_BYTES,
        op='{"response_options": {"format": "dssst1", "delivery": "chunked"}}',
    )
    assert read_op(written) == op
    assert read_op(written[:-8]) == op  # the array bytes are missing
    assert read_op(encode_frame(ONE)) == {}
    assert encode_frame(ONE, op={}) == encode_frame(ONE)


@given(trees())
@settings(max_examples=50)
def test_any_tree_comes_back(tree: TreeLike) -> None:
    written = encode_frame(tree)
    assert described(decode_frame(written)) == described(tree)
    assert encode_frame(decode_frame(written)) == written


@given(trees())
@settings(max_examples=50)
def test_every_array_of_a_frame_is_aligned_and_read_only(tree: TreeLike) -> None:
    written = encode_frame({"tree": tree, "flag": np.ones(1, np.bool_)})
    for data in (written, bytearray(written), memoryview(b"x" + written)[1:]):
        for array in _arrays_of(decode_frame(data)):
            assert array.flags.aligned
            assert not array.flags.writeable


def _arrays_of(tree: object) -> list[Array]:
    if isinstance(tree, np.ndarray):
        return [tree]
    if isinstance(tree, dict | list | tuple):
        children = tree.values() if isinstance(tree, dict) else tree
        return [array for child in children for array in _arrays_of(child)]
    return []


def test_decoding_copies_no_aligned_array() -> None:
    written = encode_frame([np.arange(100), np.ones(3, np.float16), np.ones((), np.bool_)])
    whole = np.frombuffer(written, np.uint8)
    for array in _arrays_of(decode_frame(written)):
        assert np.shares_memory(array, whole)


@given(arrays())
def test_an_array_comes_back_bit_for_bit_in_its_dtype(array: Array) -> None:
    [back] = _arrays_of(decode_frame(encode_frame([array])))
    native = array.astype(array.dtype.newbyteorder("="))
    assert back.dtype == native.dtype
    assert back.shape == native.shape
    assert back.tobytes() == native.tobytes()


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    data = np.array([1.0, -2.5, 0.15625], ml_dtypes.bfloat16)
    [back] = _arrays_of(decode_frame(encode_frame([data])))
    assert back.view(np.uint16).tolist() == [0x3F80, 0xC020, 0x3E20]
    assert back.astype(np.float32).tolist() == [1.0, -2.5, 0.15625]


def test_the_random_arrays_of_these_tests_cover_every_dtype() -> None:
    rng = np.random.default_rng(0)
    for name, dtype in DTYPES.items():
        made = [random_array(rng, name) for _ in range(40)]
        assert {NAMES[array.dtype.newbyteorder("=")] for array in made} == {NAMES[dtype]}
        assert any(not array.flags.c_contiguous for array in made)


def test_a_tuple_among_json_values_comes_back_as_a_list_as_it_does_in_the_public_client() -> None:
    assert decode_frame(encode_frame({"a": (1, 2)})) == {"a": [1, 2]}
    assert decode_frame(encode_frame(({"a": (1,)}, (2,)))) == ({"a": [1]}, (2,))
    with_array = decode_frame(encode_frame({"a": (1, 2), "b": ONE}))
    assert isinstance(with_array, dict)
    assert with_array["a"] == (1, 2)


def test_an_array_twice_in_a_tree_is_sent_twice() -> None:
    tree = {"a": ONE, "b": [ONE, ONE[1:]]}
    assert described(decode_frame(encode_frame(tree))) == described(tree)


def nested(depth: int, leaf: object = 1) -> object:
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("leaf", [1, ONE], ids=["json", "array"])
def test_a_tree_may_be_nested_to_the_limit_and_no_deeper(leaf: object) -> None:
    deepest = nested(MAX_DEPTH, leaf)
    assert described(decode_frame(encode_frame(deepest))) == described(deepest)  # pyright: ignore
    with pytest.raises(WireError, match="nested deeper than 64"):
        encode_frame(nested(MAX_DEPTH + 1, leaf))  # pyright: ignore[reportArgumentType]


def bomb() -> list[object]:
    """30 levels of a list that holds the next one twice: 2**30 containers in 30 objects."""
    value: list[object] = []
    for _ in range(30):
        value = [value, value]
    return value


loop: list[object] = []
loop.append(loop)

UNENCODABLE: list[tuple[object, str]] = [
    ({1: 2}, "the tree has the key 1; dict keys must be strings"),
    ({"a": [{"b": {None: ONE}}]}, r"the tree\.a\.0\.b has the key None"),
    ({"a": float("nan")}, r"the tree\.a is nan"),
    ([1.0, float("inf")], r"the tree\.1 is inf"),
    ([1.0, "x", float("-inf")], r"the tree\.2 is -inf"),
    ({"a": {1, 2}}, r"the tree\.a is a set; a frame holds"),
    (np.float32(1), "the tree is a float32"),
    (b"x", "is a bytes"),
    ("\ud800", "lone surrogate"),
    ({"\udfff": ONE}, "lone surrogate"),
    (loop, "nested deeper"),
    (10**5000, "4300"),
    ({"a.b": ONE, "a": {"b": ONE}}, r"two arrays have the path 'a\.b'"),
    ({"": ONE}, "reserves"),
    ({"__root__": ONE}, "'__root__': the format reserves"),
    ({"__dss_empty__": ONE}, "reserves"),
    ({"__metadata__": ONE}, "reserves"),
    (np.array(["x"]), "dtype <U1; the wire holds U64"),
    ({"a": np.zeros(1, np.complex128)}, "array 'a' has dtype complex128"),
    (np.zeros(1, [("a", np.int8)]), "dtype"),
    (np.zeros(1, ml_dtypes.int4), "dtype int4"),
    ({"a" * 70_000_000: 1}, "header would take"),
]


@pytest.mark.parametrize(("tree", "message"), UNENCODABLE, ids=[text[:30] for _, text in UNENCODABLE])
def test_what_a_frame_cannot_hold_is_refused_with_its_path(tree: object, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        encode_frame(tree)  # pyright: ignore[reportArgumentType]
    assert len(str(caught.value)) < 300


def test_a_tree_that_unfolds_without_end_is_refused() -> None:
    with pytest.raises(WireError, match="more than 2000000 lists and dicts"):
        encode_frame(bomb())  # pyright: ignore[reportArgumentType]


def test_reserved_names_are_free_where_they_name_no_array() -> None:
    tree: TreeLike = {"__root__": 1, "a": {"__root__": ONE, "__dss_empty__": ONE}, "": 2, "__metadata__": ""}
    assert described(decode_frame(encode_frame(tree))) == described(tree)


@pytest.mark.parametrize("op", [{"a": ONE}, {"a": float("nan")}, {1: 2}, [("a", 1)]])
def test_operation_metadata_is_json_only(op: object) -> None:
    with pytest.raises(WireError):
        encode_frame(None, op=op)  # pyright: ignore[reportArgumentType]


def test_a_wire_error_is_a_value_error_of_ours() -> None:
    assert issubclass(WireError, ValueError)
    assert issubclass(WireError, PilotageError)


def test_frames_that_the_writer_never_makes_but_the_format_allows_are_read() -> None:
    assert decode_frame(frame(["d", [["a", ["j", 1]]]])) == {"a": 1}
    assert decode_frame(frame(["l", [["u", []], ["l", []]]])) == [(), []]
    unsorted = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}
    back = decode_frame(frame(["l", [["t", "a"], ["t", "b"]]], unsorted, b"\x07\0\0\x80\x3f"))
    assert described(back) == described([np.array([7], np.uint8), np.array([1], np.float32)])
    two_empty = {"a": entry("F32", [0, 2**40], 0, 0), "b": entry("U8", [0], 0, 0)}
    assert described(decode_frame(frame(["l", [["t", "a"], ["t", "b"]]], two_empty))) == described(
        [np.zeros((0, 2**40), np.float32), np.zeros(0, np.uint8)]
    )
