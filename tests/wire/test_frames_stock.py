"""The public client's codec and ours read and write the same bytes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.wire.stock_peer import read_items, write_items
from tests.wire.strategies import described, random_array

from pilotage.wire.blob import DTYPES
from pilotage.wire.chunks import ChunkKind, join_chunks, split_frame
from pilotage.wire.frames import TreeLike, decode_frame, encode_frame

PEER = Path(__file__).with_name("stock_peer.py")
STOCK_READS = sorted(set(DTYPES) - {"F8_E8M0"})  # it writes that one and cannot read it
TREES = 10_000
VALUES = (None, True, 0, -7, 2**70, 0.1, 1e-300, -0.0, 1e16, "", 'a\n"\\\x00', "\u00e9\u2028\U0001f600")
KEYS = ("k", "\u00fc ", '"', "/")


@pytest.fixture
def stock_python() -> str:
    if importlib.util.find_spec("cortex_training"):
        return sys.executable
    found = os.environ.get("PILOTAGE_STOCK_PYTHON")
    if not found:
        pytest.skip("cortex-training is not installed: set PILOTAGE_STOCK_PYTHON to a Python that has it")
    return found


def run_peer(python: str, *arguments: str | Path) -> None:
    command = [python, str(PEER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def random_tree(rng: np.random.Generator, depth: int = 0) -> TreeLike:
    kind = rng.integers(9 if depth < 4 else 6)
    if kind < 3:
        return random_array(rng, STOCK_READS[rng.integers(len(STOCK_READS))])
    if kind < 6:
        return VALUES[rng.integers(len(VALUES))]
    children = [random_tree(rng, depth + 1) for _ in range(rng.integers(4))]
    if kind == 6:
        return {KEYS[rng.integers(4)] + str(index): child for index, child in enumerate(children)}
    return children if kind == 7 else tuple(children)


@pytest.mark.slow
def test_the_stock_client_decodes_our_frames_and_writes_them_again_byte_for_byte(
    stock_python: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    frames = [encode_frame(random_tree(rng)) for _ in range(TREES)]
    write_items(tmp_path / "ours", frames)

    run_peer(stock_python, "echo", tmp_path / "ours", tmp_path / "theirs")

    assert list(read_items(tmp_path / "theirs")) == frames


@pytest.mark.slow
def test_we_decode_the_stock_clients_frames_and_write_them_again_byte_for_byte(
    stock_python: str, tmp_path: Path
) -> None:
    run_peer(stock_python, "make", str(TREES), "11", tmp_path / "theirs")

    items = list(read_items(tmp_path / "theirs"))
    frames, descriptions = items[::2], items[1::2]

    assert len(frames) == TREES
    seen: set[str] = set()
    for frame, description in zip(frames, descriptions, strict=True):
        tree = decode_frame(frame)
        assert described(tree) == json.loads(description)
        assert encode_frame(tree) == frame
        seen |= {name for name in DTYPES if f'["{name}"'.encode() in description}
    assert seen == set(DTYPES)


def test_the_stock_client_joins_our_chunks_and_we_join_its(stock_python: str, tmp_path: Path) -> None:
    frame = encode_frame({"a": np.arange(10_000)})
    script = tmp_path / "chunks.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(PEER.parent)!r})\n"
        "from stock_peer import read_items, write_items\n"
        "from cortex_training import wire\n"
        "root = Path(sys.argv[1])\n"
        "frame = wire.decode_byte_chunks(list(read_items(root / 'ours')), kind='request')\n"
        "write_items(root / 'joined', [frame])\n"
        "cut = dict(operation='fwd-bwd', max_bytes=30_000, chunk_group_id='g')\n"
        "write_items(root / 'request', wire.encode_byte_chunks(frame, kind='request', **cut))\n"
        "write_items(root / 'result', wire.encode_byte_chunks(frame, kind='result', max_bytes=30_000))\n"
    )
    ours = split_frame(frame, kind=ChunkKind.REQUEST, operation="fwd-bwd", max_bytes=30_000, group_id="g")
    write_items(tmp_path / "ours", reversed(ours))

    done = subprocess.run(
        [stock_python, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert list(read_items(tmp_path / "joined")) == [frame]
    assert join_chunks(list(read_items(tmp_path / "request")), ChunkKind.REQUEST) == frame
    assert join_chunks(list(read_items(tmp_path / "result")), ChunkKind.RESULT) == frame
    # Its metadata comes in an order of its own, so chunks are compared without their headers' order.
    theirs = list(read_items(tmp_path / "request"))
    assert [sorted(chunk) for chunk in theirs] == [sorted(chunk) for chunk in ours]
