"""A package of three files, its tests and its source archive, all ours; and an index in a directory."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

SOURCES: Mapping[str, str] = {
    "toybox/__init__.py": """from toybox.counts import Counter
from toybox.words import join, shorten
""",
    "toybox/counts.py": '''"""Counting."""


class Counter:
    """Counts up to a limit."""

    limit = 3

    def __init__(self, start=0):
        self.value = start
        self.calls = 0

    def up(self, by=1):
        """Go up."""
        self.calls += 1
        if self.value + by > self.limit:
            raise ValueError(f"over {self.limit}")
        self.value = self.value + by
        return self.value

    def left(self):
        return self.limit - self.value

    @property
    def is_full(self):
        return self.value >= self.limit
''',
    "toybox/words.py": '''"""Words."""


def join(words, sep=", ", last=" and "):
    words = list(words)
    if len(words) < 2:
        return "".join(words)
    return sep.join(words[:-1]) + last + words[-1]


def shorten(text, size):
    if len(text) <= size:
        return text
    return text[: size - 3] + "..."


def first(items, default=None):
    for item in items:
        if item:
            return item
    return default
''',
}
TESTS: Mapping[str, str] = {
    "tests/__init__.py": "",
    "tests/test_toybox.py": '''import pytest

from toybox import Counter, join, shorten
from toybox.words import first


def test_a_counter_goes_up():
    counter = Counter()
    assert counter.up() == 1
    assert counter.up(2) == 3
    assert counter.calls == 2


def test_a_counter_has_a_limit():
    counter = Counter(3)
    with pytest.raises(ValueError, match="over 3"):
        counter.up()


def test_what_is_left():
    counter = Counter(1)
    assert counter.left() == 2
    assert not counter.is_full


class TestWords:
    @pytest.mark.parametrize(("words", "text"), [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
    def test_join(self, words, text):
        """Words are joined."""
        assert join(words) == text

    def test_shorten(self):
        assert shorten("abcdefgh", 8) == "abcdefgh"
        assert shorten("abcdefghi", 8) == "abcde..."

    def test_first(self):
        assert first([0, 2, 3]) == 2
        assert first([], 5) == 5
''',
}
OTHER: Mapping[str, str] = {
    "PKG-INFO": "Name: toybox\nVersion: 1.0\n",
    "LICENSE": "Ours.\n",
    "README.md": "# toybox\n",
}
FILES = {path: text.encode() for path, text in {**SOURCES, **TESTS, **OTHER}.items()}


def archive(files: Mapping[str, bytes], top: str = "toybox-1.0") -> bytes:
    """Return a .tar.gz of the files below `top`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def add_to_index(index: Path, name: str, version: str, content: bytes, *, sha256: str | None = None) -> str:
    """Put an archive into the index directory; returns the URL of the index."""
    page = index / name
    page.mkdir(parents=True, exist_ok=True)
    filename = f"{name}-{version}.tar.gz"
    (page / filename).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest() if sha256 is None else sha256
    with (page / "index.html").open("a") as file:
        file.write(f'<a href="{filename}#sha256={digest}">{filename}</a><br>\n')
        file.write(f'<a href="{name}-9.0-py3-none-any.whl#sha256=00">wheel</a><br>\n')
    return index.as_uri()
