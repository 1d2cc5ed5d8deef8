"""The public client's codec in a process of its own, because its environment has torch and ours need not.

    python stock_peer.py echo IN OUT              decode each frame of IN, encode it again into OUT
    python stock_peer.py make COUNT SEED OUT      encode COUNT random trees; each is followed by what it is

Files hold items of a 4-byte little-endian size and that many bytes.
"""

import json
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SHAPES = ((), (1,), (5,), (0,), (2, 3), (3, 0, 2), (2, 1, 4))
VALUES = (None, True, 0, -7, 2**70, 0.1, 1e-300, -0.0, 1e16, "", 'a\n"\\\x00', "\u00e9\u2028\U0001f600")
NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}


def write_items(path: Path, items: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for item in items:
            file.write(struct.pack("<I", len(item)) + item)


def read_items(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    start = 0
    while start < len(data):
        (size,) = struct.unpack_from("<I", data, start)
        yield data[start + 4 : start + 4 + size]
        start += 4 + size


def describe(tree: Any, array: Callable[[Any], list[object] | None]) -> object:
    """Return a JSON value that is equal for equal trees only; tuples in JSON values count as lists."""
    if (found := array(tree)) is not None:
        return {"array": found}
    if isinstance(tree, tuple):
        return {"tuple": [describe(child, array) for child in tree]}
    if not _holds_array(tree, array):
        return {"json": json.loads(json.dumps(tree)), "text": json.dumps(tree)}  # 1, 1.0 and True are equal
    if isinstance(tree, dict):
        return {"dict": [[key, describe(child, array)] for key, child in tree.items()]}
    return {"list": [describe(child, array) for child in tree]}


def _holds_array(tree: Any, array: Callable[[Any], list[object] | None]) -> bool:
    if isinstance(tree, dict | list | tuple):
        children = tree.values() if isinstance(tree, dict) else tree
        return any(_holds_array(child, array) for child in children)
    return array(tree) is not None


def _make_tensor(draw: random.Random, made: list[Any]) -> Any:
    import torch

    if made and draw.random() < 0.2:
        return draw.choice(made)  # the same storage twice
    dtype = getattr(torch, draw.choice(list(NAMES)))
    shape = draw.choice(SHAPES)
    wide = bool(shape) and draw.random() < 0.3
    base = [2 * length for length in shape] if wide else list(shape)
    count = int(torch.tensor(base, dtype=torch.int64).prod()) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(base)
    if wide:
        tensor = tensor[tuple(slice(None, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))
    else:
        made.append(tensor)
    return tensor


def _make_tree(draw: random.Random, made: list[Any], depth: int) -> Any:
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind < 3:
        return _make_tensor(draw, made)
    if kind < 6:
        return draw.choice(VALUES)
    children = [_make_tree(draw, made, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(["k", "\u00fc ", '"', "/"]) + str(i): child for i, child in enumerate(children)}
    return children if kind == 7 else tuple(children)


def _tensor(value: Any) -> list[object] | None:
    import torch

    if not torch.is_tensor(value):
        return None
    name = NAMES[str(value.dtype).removeprefix("torch.")]
    packed = value.clone(memory_format=torch.contiguous_format).reshape(-1)  # also where an axis has length 1
    raw = packed.view(torch.uint8)
    return [name, list(value.shape), raw.numpy().tobytes().hex()]


def main(arguments: list[str]) -> None:
    import torch
    from cortex_training import wire  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    if arguments[0] == "echo":
        frames = read_items(Path(arguments[1]))
        write_items(Path(arguments[2]), (wire.dumps(wire.loads(frame)) for frame in frames))
        return
    draw = random.Random(int(arguments[2]))
    torch.manual_seed(int(arguments[2]))
    items: list[bytes] = []
    for _ in range(int(arguments[1])):
        tree = _make_tree(draw, [], 0)
        items += [wire.dumps(tree), json.dumps(describe(tree, _tensor)).encode()]
    write_items(Path(arguments[3]), items)


if __name__ == "__main__":
    main(sys.argv[1:])
