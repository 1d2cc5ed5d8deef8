"""DSSST1 frames: a tree of dicts, lists, tuples, JSON values and arrays as one safetensors blob.

The blob's metadata holds two JSON texts: `dss`, the tree, and `op`, what the receiver must know before it
reads arrays (chunk descriptors, response options). The nodes of a tree:

    ["t", key]                    the array stored under `key`
    ["t", key, {"scalar": true}]  a 0-d array, stored with shape [1]
    ["j", value]                  a JSON value without arrays
    ["d", [[key, node], ...]]     a dict that holds arrays
    ["l", [node, ...]]            a list that holds arrays
    ["u", [node, ...]]            a tuple, with or without arrays

An array's key is its path, dict keys and indexes joined by dots. A frame without arrays carries one zero
byte under `__dss_empty__`, because some readers want at least one array.

Invariant: `encode_frame` writes the bytes that the public client writes, and `decode_frame(encode_frame(x))`
is x. Like there, a tuple below a dict or list without any array comes back as a list: it is inside a "j"
node, which is JSON. Unlike there, what the format would corrupt is refused: two paths that join to one key,
keys that the format reserves, dict keys that JSON would turn into strings, NaN and Infinity.

Cost: linear in the bytes. Decoding copies no array; the Python objects of JSON values take at most about
thirty times their text, whose size and number of containers are limited.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from pilotage.errors import WireError
from pilotage.wire.blob import (
    MAX_CONTAINERS,
    METADATA_KEY,
    Array,
    Buffer,
    parse_json,
    read_arrays,
    read_header,
    write_blob,
)

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
type Tree = Array | bool | int | float | str | list[Tree] | tuple[Tree, ...] | dict[str, Tree] | None
"""What a frame decodes to."""
type TreeLike = Array | bool | int | float | str | Sequence[TreeLike] | Mapping[str, TreeLike] | None
"""What can be encoded: at run time dicts, lists and tuples only, whatever their static types."""

VERSION = "DSSST1"
MAX_DEPTH = 64
"""Containers inside one another, JSON values included."""

_ROOT_KEY = "__root__"
_EMPTY_KEY = "__dss_empty__"
_RESERVED_PATHS = ("", _ROOT_KEY, _EMPTY_KEY, METADATA_KEY)
_INERT_TYPES = frozenset({bool, int, type(None)})


def encode_frame(tree: TreeLike, *, op: Mapping[str, TreeLike] | None = None) -> bytes:
    """Return `tree` as one frame; arrays may be of any layout and may share memory.

    Args:
        op: JSON object for the receiver, readable by `read_op` without the arrays. Empty is absent.

    Raises:
        WireError: the tree cannot be held exactly; the message names the path.
    """
    survey = _Survey()
    survey.visit(tree, "the tree", 0)
    writer = _TreeWriter(survey.holders)
    metadata = {"dss": _dump({"v": VERSION, "tree": writer.node(tree, None)}, "the tree")}
    if op:
        if not isinstance(op, dict) or _Survey().visit(op, "op", 0):
            raise WireError("op must be a dict, and may hold no array")
        metadata["op"] = _dump(op, "op")
    return write_blob(writer.arrays or {_EMPTY_KEY: np.zeros(1, np.uint8)}, metadata)


def decode_frame(data: Buffer) -> Tree:
    """Return the tree of a frame from anywhere.

    Returns:
        Arrays are read-only; they are views of `data` where its alignment allows, and keep it alive.

    Raises:
        WireError: the bytes are not exactly a frame. No other exception, whatever the bytes.
    """
    header = read_header(data)
    text = header.metadata.get("dss")
    if text is None:
        raise WireError("a safetensors blob without the DSSST1 structure ('dss' in its metadata)")
    match parse_json(text, "the DSSST1 structure"):
        case {"v": "DSSST1", "tree": node}:
            pass
        case {"v": version, "tree": _}:
            raise WireError(f"DSSST1 structure of version {reprlib.repr(version)}; this reads {VERSION}")
        case _:
            raise WireError("the DSSST1 structure is not an object with 'v' and 'tree'")
    arrays = read_arrays(data, header)
    arrays.pop(_EMPTY_KEY, None)
    tree = _TreeReader(arrays).read(node, 0)
    if arrays:
        raise WireError(f"array {reprlib.repr(next(iter(arrays)))} belongs to no node of the tree")
    return tree


def read_op(data: Buffer) -> dict[str, Json]:
    """Return a frame's operation metadata, {} where it has none; its arrays are not looked at.

    Raises:
        WireError: the header is not that of a safetensors blob, or `op` is not a JSON object.
    """
    text = read_header(data).metadata.get("op")
    if text is None:
        return {}
    op = parse_json(text, "op")
    if not isinstance(op, dict):
        raise WireError("op is not a JSON object")
    _Survey().visit(op, "op", 0)
    return cast(dict[str, Json], op)


def _dump(value: object, what: str) -> str:
    try:
        return json.dumps(value)
    except ValueError as error:  # an integer over Python's 4,300 digits
        raise WireError(f"{what}: {error}") from error


class _Survey:
    """One pass over a tree: refuses what a frame cannot hold, and finds the containers of arrays."""

    def __init__(self) -> None:
        self.holders: set[int] = set()
        """Identities of the containers that hold an array, at any depth."""
        self._containers = 0

    def visit(self, value: object, path: str, depth: int) -> bool:
        """Return whether `value` is or holds an array."""
        if isinstance(value, np.ndarray):
            return True
        if not isinstance(value, (dict, list, tuple)):
            _check_leaf(value, path)
            return False
        self._enter(path, depth)
        if isinstance(value, dict):
            _check_keys(value, path)
            names, children = value.keys(), value.values()
        else:
            names, children = range(len(value)), value
        kinds = set(map(type, children))
        if kinds <= _INERT_TYPES or (kinds == {float} and all(map(math.isfinite, children))):
            return False  # a long list of numbers costs no Python call per number
        found = False
        path = _brief(path)  # so that a long key is not copied once for each value below it
        for name, child in zip(names, children, strict=True):
            found |= self.visit(child, f"{path}.{name}", depth + 1)
        if found:
            self.holders.add(id(value))
        return found

    def _enter(self, path: str, depth: int) -> None:
        self._containers += 1
        if depth >= MAX_DEPTH:
            raise WireError(f"{_brief(path)} is nested deeper than {MAX_DEPTH} containers")
        if self._containers > MAX_CONTAINERS:
            raise WireError(f"more than {MAX_CONTAINERS} lists and dicts; send numbers as arrays")


def _check_keys(value: dict[object, object], path: str) -> None:
    for key in value:
        if not isinstance(key, str):
            raise WireError(f"{_brief(path)} has the key {reprlib.repr(key)}; dict keys must be strings")
        _check_text(key, path)


def _check_leaf(value: object, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(f"{_brief(path)} is {value}, which JSON cannot hold; send it in an array")
    elif not isinstance(value, int | None):
        raise WireError(
            f"{_brief(path)} is a {type(value).__name__}; a frame holds arrays (np.ndarray), dicts, lists,"
            " tuples, strings, numbers, booleans and None"
        )


def _check_text(text: str, path: str) -> None:
    """Refuse lone surrogates: they cannot be written to a file or a log later."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"{_brief(path)} holds a lone surrogate, which is not Unicode text") from error


def _brief(path: str) -> str:
    return path if len(path) <= 100 else f"{path[:50]}...{path[-47:]}"


class _TreeWriter:
    """Turns a surveyed tree into nodes, and collects its arrays."""

    def __init__(self, holders: set[int]) -> None:
        self._holders = holders
        self.arrays: dict[str, Array] = {}

    def node(self, value: object, path: str | None) -> list[object]:
        """Return the node of `value`; `path` is None for the root."""
        if isinstance(value, np.ndarray):
            return self._array_node(value, path)
        if isinstance(value, tuple):
            return ["u", self._nodes(value, path)]
        if id(value) not in self._holders:
            return ["j", value]
        if isinstance(value, dict):
            return ["d", [[key, self.node(child, _join(path, key))] for key, child in value.items()]]
        return ["l", self._nodes(cast(list[object], value), path)]

    def _nodes(self, values: Sequence[object], path: str | None) -> list[object]:
        return [self.node(child, _join(path, str(index))) for index, child in enumerate(values)]

    def _array_node(self, array: Array, path: str | None) -> list[object]:
        if path in _RESERVED_PATHS:
            raise WireError(f"an array may not be stored under {path!r}: the format reserves that key")
        key = _ROOT_KEY if path is None else path
        if key in self.arrays:
            raise WireError(f"two arrays have the path {_brief(key)!r}: a dict key holds a dot; rename it")
        self.arrays[key] = array.reshape(1) if array.ndim == 0 else array
        return ["t", key, {"scalar": True}] if array.ndim == 0 else ["t", key]


def _join(path: str | None, part: str) -> str:
    return f"{path}.{part}" if path else part


class _TreeReader:
    """Turns nodes back into a tree, taking each array once."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def read(self, node: object, depth: int) -> Tree:
        match node:
            case ["t", str(key)]:
                return self._take(key)
            case ["t", str(key), {"scalar": True, **rest}] if not rest:
                return self._take_scalar(key)
            case ["j", value]:
                _Survey().visit(value, "a JSON value", depth)
                return cast(Tree, value)
            case ["d" | "l" | "u" as tag, list(children)]:
                if depth >= MAX_DEPTH:
                    raise WireError(f"the tree is nested deeper than {MAX_DEPTH} containers")
                return self._container(str(tag), children, depth + 1)
            case _:
                raise WireError(f"{reprlib.repr(node)} is not a DSSST1 node")

    def _container(self, tag: str, children: list[object], depth: int) -> Tree:
        if tag == "d":
            return self._dict(children, depth)
        read = [self.read(child, depth) for child in children]
        return read if tag == "l" else tuple(read)

    def _dict(self, children: list[object], depth: int) -> dict[str, Tree]:
        made: dict[str, Tree] = {}
        for child in children:
            match child:
                case [str(key), node] if key not in made:
                    _check_text(key, "a dict key")
                    made[key] = self.read(node, depth)
                case _:
                    raise WireError(f"{reprlib.repr(child)} is no [key, node] pair with a key of its own")
        return made

    def _take(self, key: str) -> Array:
        array = self._arrays.pop(key, None)
        if array is None:
            raise WireError(f"no array {reprlib.repr(key)} for a node: it is missing, or two nodes name it")
        return array

    def _take_scalar(self, key: str) -> Array:
        array = self._take(key)
        if array.shape != (1,):
            raise WireError(f"array {reprlib.repr(key)} is a scalar, but of shape {array.shape}, not [1]")
        return array.reshape(())
