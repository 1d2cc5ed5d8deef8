"""Localization without a model: rank a tree's functions for an issue text.

These are the controls of every reward curve. BM25 is Okapi's (k1 1.5, b 0.75) over one document a function:
the words of its path, its class twice, its name three times, and its source. Words are lower-case, snake and
camel parts beside the whole; a word of the issue counts three times at most.
"""

import ast
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pilotage.localization.parsing import parse

_K1, _B = 1.5, 0.75
_MAX_QUERY_COUNT = 3
_MIN_IDENTIFIER = 3
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_STOP_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be been but by can code do does for from get has have i if in is it its not of on"
        " or self should that the then there this to was we when which will with would you"
    )
)
_LEFT_OUT = frozenset({"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmarks"})


@dataclass(frozen=True, slots=True)
class Function:
    """One definition of a tree, and what is searched for it."""

    path: str
    class_name: str
    """Empty for a top-level function."""
    name: str
    source: str

    @property
    def location(self) -> dict[str, str]:
        """The hand-in that names it."""
        owner = {"class_name": self.class_name} if self.class_name else {}
        return {"file": self.path, **owner, "function_name": self.name}


def _is_left_out(path: str) -> bool:
    *directories, name = path.split("/")
    return (
        not path.endswith(".py")
        or bool(_LEFT_OUT & set(directories))
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name in {"conftest.py", "setup.py"}
    )


def functions_of(sources: Mapping[str, str]) -> list[Function]:
    """Return the top-level functions and methods of a tree, without tests, documents and examples."""
    return [
        function
        for path, source in sorted(sources.items())
        if not _is_left_out(path)
        for function in _functions_of_file(path, source)
    ]


@lru_cache(maxsize=2000)  # the tasks of one package differ in a file
def _functions_of_file(path: str, source: str) -> tuple[Function, ...]:
    tree = parse(source)
    if tree is None:
        return ()
    lines = source.splitlines()
    return tuple(
        Function(path, owner, node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for statement in tree.body
        for owner, members in [
            (statement.name, statement.body) if isinstance(statement, ast.ClassDef) else ("", [statement])
        ]
        for node in members
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def words_of(text: str) -> list[str]:
    """Return the words of a text: identifiers, and their snake and camel parts, without stop words."""
    words: list[str] = []
    for word in _WORD.findall(text):
        parts = [part.lower() for part in _PART.findall(word)]
        words += [word.lower(), *(parts if len(parts) > 1 else [])]
    return [word for word in words if word not in _STOP_WORDS and len(word) > 1]


@lru_cache(maxsize=50_000)
def _counts(function: Function) -> Counter[str]:
    owner, name = function.class_name, function.name
    return Counter(words_of(f"{function.path} {owner} {owner} {name} {name} {name} {function.source}"))


class Bm25:
    """An index of one tree's functions."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = functions
        self._counts = [_counts(function) for function in functions]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(len(functions), 1)
        self._frequency = Counter(word for counts in self._counts for word in counts)

    def rank(self, issue: str, top: int) -> list[Function]:
        """Return the `top` best functions that share a word with the issue, best first."""
        query = {word: min(n, _MAX_QUERY_COUNT) for word, n in Counter(words_of(issue)).items()}
        scores = [self._score(query, index) for index in range(len(self._functions))]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return [self._functions[index] for index in order[:top] if scores[index] > 0]

    def _score(self, query: Mapping[str, int], index: int) -> float:
        counts = self._counts[index]
        norm = _K1 * (1 - _B + _B * self._lengths[index] / self._mean_length)
        total = 0.0
        for word, weight in query.items():
            if count := counts.get(word, 0):
                holders = self._frequency[word]
                rarity = math.log(1 + (len(self._functions) - holders + 0.5) / (holders + 0.5))
                total += weight * rarity * count * (_K1 + 1) / (count + norm)
        return total


def named_in(functions: Iterable[Function], issue: str) -> list[Function]:
    """Return the functions whose name the issue holds as a word: what a grep for identifiers finds."""
    named = set(_WORD.findall(issue))
    return [f for f in functions if f.name in named and len(f.name) >= _MIN_IDENTIFIER]


def locate(method: str, functions: Sequence[Function], index: Bm25, issue: str, seed: str) -> list[Function]:
    """Return what one baseline hands in.

    Args:
        method: of `BASELINES`.
        seed: of the random baseline; a task's name makes it reproducible.

    Raises:
        ValueError: an unknown method.
    """
    match method.split("-"):
        case ["random"]:
            return random.Random(seed).sample(functions, min(1, len(functions)))
        case ["bm25", top]:
            return index.rank(issue, int(top))
        case ["identifiers"]:
            # Several may be named; the best of them by BM25, and BM25's own choice where none is.
            return (
                Bm25(named).rank(issue, 1) if (named := named_in(functions, issue)) else index.rank(issue, 1)
            )
        case _:
            raise ValueError(f"method is one of {', '.join(BASELINES)}; got {method!r}")


BASELINES = ("random", "bm25-1", "bm25-2", "bm25-3", "identifiers")
