"""Localization tasks from installed packages: a real package with one bug in it, as a Harbor task.

The agent gets the buggy sources alone: no bytecode, no clean copy. The issue names identifiers that the
buggy function uses, never the function, its class or its file.
"""

import ast
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pilotage.datasets.bugs import Bug, find_bugs, functions_of
from pilotage.datasets.localization_tasks import LocalizationTask, write_localization_task
from pilotage.errors import ConfigError
from pilotage.localization import COMMON_NAMES, MIN_NAME, gold_places

DEMO_TRAIN = ("click", "httpx", "jinja2", "starlette")
DEMO_HELD_OUT = ("markdown_it", "packaging", "uvicorn")
NUM_CLUES = 3

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SYMPTOMS: Mapping[str, Sequence[str]] = {
    "comparison": ("A limit is checked the wrong way.", "Two values are compared wrongly."),
    "connective": ("Two checks are joined the wrong way.", "One check wins over another."),
    "inverted_condition": ("A check does the opposite of what it should.", "The wrong branch runs."),
    "constant": ("A number is off by one.", "A count comes out too high."),
    "lost_result": ("A result gets lost.", "Nothing comes back where a value should."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    path: str
    kind: str
    buggy: str
    clues: tuple[str, ...]
    symptoms: tuple[str, ...]
    """Sentences that fit the kind of bug and name no place."""


def package_sources(package: str) -> dict[str, str]:
    """Return path -> source of an installed package, `PACKAGE/...`, tests and vendored code left out.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package {package!r} is not installed; run `make install`")
    root = Path(next(iter(spec.submodule_search_locations)))
    sources: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not {"tests", "_vendor", "vendor"} & set(relative.parts):
            sources[f"{package}/{relative.as_posix()}"] = path.read_bytes().decode()
    return sources


type _Key = tuple[str, str, str]
"""Path, class and function of a definition."""


@dataclass(frozen=True, slots=True)
class _Definition:
    words: frozenset[str]
    """Every word of its lines: what a search finds."""
    identifiers: frozenset[str]
    """The names, attributes and arguments of its code: what an issue may mention."""


def _definitions(sources: Mapping[str, str]) -> dict[_Key, _Definition]:
    found: dict[_Key, _Definition] = {}
    for path, source in sources.items():
        lines = source.splitlines()
        for owner, function in functions_of(ast.parse(source)):
            text = "\n".join(lines[function.lineno - 1 : function.end_lineno])
            found[path, owner, function.name] = _Definition(
                frozenset(_WORD.findall(text)), frozenset(_identifiers(function))
            )
    return found


def _identifiers(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case _:
                pass


def _names(key: _Key) -> set[str]:
    """Return the words, in lower case, that would give the place away."""
    path, owner, function = key
    return {part.lower() for part in re.split(r"[/.]", path)} | {owner.lower(), function.lower()}


def _clue_choices(key: _Key, definition: _Definition, frequency: Counter[str]) -> list[str]:
    """Return words that only help to find the bug: used in its function, naming no place."""
    named = _names(key)
    return sorted(
        word
        for word in definition.identifiers
        if len(word) >= MIN_NAME
        and word not in COMMON_NAMES
        and word.lower() not in named
        and 2 <= frequency[word] <= 12
    )


def _bugs_by_function(sources: Mapping[str, str]) -> dict[_Key, list[Bug]]:
    bugs: dict[_Key, list[Bug]] = {}
    for path, source in sources.items():
        if "\f" not in source:
            for bug in find_bugs(source):
                bugs.setdefault((path, bug.class_name, bug.function_name), []).append(bug)
    return bugs


def _candidates(sources: Mapping[str, str], rng: random.Random) -> Iterator[_Candidate]:
    """Yield at most one bug a function, in random order, each with clues that single its function out."""
    definitions = _definitions(sources)
    frequency = Counter(word for definition in definitions.values() for word in definition.words)
    bugs = _bugs_by_function(sources)
    keys = sorted(bugs)
    rng.shuffle(keys)
    for key in keys:
        bug = rng.choice(bugs[key])
        choices = _clue_choices(key, definitions[key], frequency)
        if len(choices) < NUM_CLUES:
            continue
        clues = tuple(rng.sample(choices, NUM_CLUES))
        if sum(definition.words >= set(clues) for definition in definitions.values()) > 2:
            continue
        buggy = bug.applied_to(sources[key[0]])
        symptoms = tuple(s for s in _SYMPTOMS[bug.kind] if not _names(key) & set(_WORD.findall(s.lower())))
        if buggy is not None and symptoms:
            yield _Candidate(path=key[0], kind=bug.kind, buggy=buggy, clues=clues, symptoms=symptoms)


def _instruction(candidate: _Candidate, rng: random.Random) -> str:
    first, second, third = candidate.clues
    symptom = rng.choice(_SYMPTOMS[candidate.kind])
    if symptom not in candidate.symptoms:
        symptom = candidate.symptoms[0]
    return f"{symptom}\nSeen with `{first}`, `{second}` and `{third}`.\n"


def _task(
    name: str, package: str, sources: Mapping[str, str], candidate: _Candidate, rng: random.Random
) -> LocalizationTask:
    buggy = {**sources, candidate.path: candidate.buggy}
    gold = gold_places(buggy, sources)
    assert gold.functions, (name, candidate.path, candidate.clues)
    return LocalizationTask(
        name=name,
        description=f"Find the place of a bug in {package}",
        instruction=_instruction(candidate, rng),
        tree={path: source.encode() for path, source in buggy.items()},
        gold=gold,
        metadata={"package": package, "bug_kind": candidate.kind},
    )


def write_package_tasks(out: Path, *, packages: Sequence[str], num_tasks: int, seed: int) -> list[Path]:
    """Write `num_tasks` tasks, spread evenly over `packages`, into the new directory `out`.

    The same packages, versions and seed give the same bytes. `out` appears only when it is whole.

    Raises:
        ConfigError: no task is asked for, a package is not installed, or it has too few functions for its
            share.
    """
    if num_tasks < 1:
        raise ConfigError(f"the number of tasks must be positive, got {num_tasks}")
    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    written: list[Path] = []
    for index, package in enumerate(packages):
        share = num_tasks // len(packages) + (index < num_tasks % len(packages))
        rng = random.Random(f"{seed}-{package}")
        sources = package_sources(package)
        candidates = _candidates(sources, rng)
        for number in range(share):
            candidate = next(candidates, None)
            if candidate is None:
                raise ConfigError(f"package {package!r} yields {number} tasks, {share} were asked for")
            name = f"{package}-{number:04d}"
            write_localization_task(building / name, _task(name, package, sources, candidate, rng))
            written.append(out / name)
    building.rename(out)
    return written
