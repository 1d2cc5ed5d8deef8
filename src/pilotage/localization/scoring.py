"""Score a hand-in of code locations: file F1 + module F1 + function F1, from 0 to 3.

This file runs in two places: imported by Pilotage, and copied into a task's `tests/` as the verifier:

    python3 score.py GOLD.json LOCATIONS.json REWARD.json

so it imports the standard library only, and little of it: every rollout starts an interpreter for it, and
dataclasses, pathlib and typing would take three times as long as all the rest. It always writes a reward: no
answer, or one that breaks the rules, scores 0 and says why.

What a level without gold is worth is the task's choice, `empty`:

    zero    0, whatever was answered, as in CodeScout; a task with such a level cannot reach 3
    match   1 if the answer leaves the level empty too, else 0; every task can reach 3

Under both, an answer without any location scores 0.
"""

from __future__ import annotations  # nothing evaluates them, so what they name need not be imported

import json
import os
import posixpath
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

type EmptyLevel = Literal["zero", "match"]

LEVELS = ("files", "modules", "functions")
MAX_LOCATIONS = 50
MAX_HANDIN_BYTES = 1_000_000


class _Record:
    """A frozen record, equal to one of equal fields."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )


class Places(_Record):
    """What should change, or what an answer names, at the three levels."""

    files: frozenset[str]
    """Paths relative to the tree's root."""
    modules: frozenset[str]
    """`path:Class` or `path:function`."""
    functions: frozenset[str]
    """`path:Class.method` or `path:function`."""

    def __init__(self, *, files: frozenset[str], modules: frozenset[str], functions: frozenset[str]) -> None:
        vars(self).update(files=files, modules=modules, functions=functions)

    def to_record(self) -> dict[str, list[str]]:
        """Return the three levels as sorted lists, as `gold.json` holds them."""
        return {level: sorted(getattr(self, level)) for level in LEVELS}


class Score(_Record):
    """F1 of each level; their sum is the reward."""

    file_f1: float
    module_f1: float
    function_f1: float

    def __init__(self, *, file_f1: float, module_f1: float, function_f1: float) -> None:
        vars(self).update(file_f1=file_f1, module_f1=module_f1, function_f1=function_f1)

    @property
    def total(self) -> float:
        """The reward, from 0 to 3."""
        return self.file_f1 + self.module_f1 + self.function_f1


class InvalidAnswerError(ValueError):
    """The hand-in breaks a rule; it scores 0."""


def _normalised_path(text: str) -> str:
    path = posixpath.normpath(text.strip().replace("\\", "/"))
    if not text.strip() or path == "." or path.startswith(("/", "../")) or path == "..":
        raise InvalidAnswerError(f"not a path inside the tree: {text!r}")
    return path


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key) or ""
    if not isinstance(value, str):
        raise InvalidAnswerError(f"{key} must be a string, got {type(value).__name__}")
    return value.strip()


def location_record(text: str) -> dict[str, str]:
    """Read the short form of a location, as `code_search` prints it and pytest names tests.

    `path`, `path::function`, `path::Class::` (the class itself), `path::Class::method`.

    Raises:
        InvalidAnswerError: more than three parts.
    """
    path, *names = text.split("::")
    match names:
        case []:
            return {"file": path}
        case [function]:
            return {"file": path, "function_name": function}
        case [class_name, function]:
            return {"file": path, "class_name": class_name, "function_name": function}
        case _:
            raise InvalidAnswerError(f"a location is path::Class::method at most, got {text!r}")


def places_of(locations: Any) -> Places:
    """Turn a list of `{file, class_name?, function_name?}`, or of their short forms, into places.

    A nested class is cut to its outermost one; `function_name="C.m"` without a class is split on its
    first dot. Duplicates collapse.

    Raises:
        InvalidAnswerError: not a list of at most 50 such records, or a path outside the tree.
    """
    if not isinstance(locations, list) or len(locations) > MAX_LOCATIONS:
        raise InvalidAnswerError(f"locations must be a list of at most {MAX_LOCATIONS} records")
    files: set[str] = set()
    modules: set[str] = set()
    functions: set[str] = set()
    for given in locations:
        record = location_record(given) if isinstance(given, str) else given
        if not isinstance(record, dict):
            raise InvalidAnswerError(f"a location must be an object, got {record!r}")
        path = _normalised_path(_text(record, "file"))
        class_name = _text(record, "class_name").partition(".")[0]
        function = _text(record, "function_name")
        if not class_name and "." in function:
            class_name, _, function = function.partition(".")
        function = function.rpartition(".")[2] if class_name else function.partition(".")[0]
        files.add(path)
        if class_name or function:
            modules.add(f"{path}:{class_name or function}")
        if function:
            functions.add(f"{path}:{class_name}.{function}" if class_name else f"{path}:{function}")
    return Places(files=frozenset(files), modules=frozenset(modules), functions=frozenset(functions))


def locations_of(places: Places) -> list[dict[str, str]]:
    """Return the shortest hand-in that names exactly these places; the inverse of `places_of`."""
    locations: list[dict[str, str]] = []
    named: set[str] = set()
    for place in sorted(places.functions):
        path, _, name = place.partition(":")
        owner, _, function = name.rpartition(".")
        locations.append({"file": path} | ({"class_name": owner} if owner else {}))
        locations[-1]["function_name"] = function
        named |= {path, f"{path}:{owner or function}"}
    for place in sorted(places.modules - named):
        path, _, name = place.partition(":")
        locations.append({"file": path, "class_name": name})
        named.add(path)
    return locations + [{"file": path} for path in sorted(places.files - named)]


def _f1(answer: frozenset[str], gold: frozenset[str], empty: EmptyLevel) -> float:
    # 2 |A & G| / (|A| + |G|) is the harmonic mean of precision and recall.
    if not gold:
        return float(empty == "match" and not answer)
    return 2 * len(answer & gold) / (len(answer) + len(gold))


def score_locations(answer: Places, gold: Places, *, empty: EmptyLevel = "zero") -> Score:
    """Compare an answer with the gold places; an answer without a file scores 0 everywhere."""
    if not answer.files:
        return Score(file_f1=0.0, module_f1=0.0, function_f1=0.0)
    return Score(
        file_f1=_f1(answer.files, gold.files, empty),
        module_f1=_f1(answer.modules, gold.modules, empty),
        function_f1=_f1(answer.functions, gold.functions, empty),
    )


def ceiling(gold: Places, *, empty: EmptyLevel = "zero") -> float:
    """Return the most that any answer can score."""
    return score_locations(gold, gold, empty=empty).total


def read_gold(path: str | os.PathLike[str]) -> tuple[Places, EmptyLevel]:
    """Read a task's `gold.json`: the places, and what an empty level is worth.

    Raises:
        OSError: there is none.
        ValueError, KeyError, TypeError: it is of another form.
    """
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    return Places(**{level: frozenset(record[level]) for level in LEVELS}), record.get("empty", "zero")


def _read_answer(path: str) -> Places:
    if not os.path.isfile(path):
        raise InvalidAnswerError("no hand-in")
    if os.path.getsize(path) > MAX_HANDIN_BYTES:
        raise InvalidAnswerError(f"the hand-in is larger than {MAX_HANDIN_BYTES} bytes")
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except ValueError as error:
        raise InvalidAnswerError(f"the hand-in is not JSON: {error}") from error
    return places_of(record.get("locations") if isinstance(record, dict) else record)


def main(argv: list[str]) -> int:
    """Score one hand-in and write `reward.json`; the verifier's entry point."""
    gold_path, answer_path, reward_path = argv
    gold, empty = read_gold(gold_path)
    no_answer = 0
    try:
        score = score_locations(_read_answer(answer_path), gold, empty=empty)
    except InvalidAnswerError as error:
        sys.stdout.write(f"scored 0: {error}\n")
        score, no_answer = Score(file_f1=0.0, module_f1=0.0, function_f1=0.0), 1
    reward = {
        "reward": score.total,
        "file_f1": score.file_f1,
        "module_f1": score.module_f1,
        "function_f1": score.function_f1,
        "no_answer": no_answer,
    }
    with open(reward_path, "w", encoding="utf-8") as file:
        file.write(json.dumps(reward) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
