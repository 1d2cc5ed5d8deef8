"""Issue text without a model, at the *symptom* level: what was called, and how it failed.

Invariant: no name of a test, no traceback, and no file, path or dotted module of a gold file is in the text.
The bare name of a gold function may be, since a test calls what it tests; flags say so.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from pilotage.datasets.factory.suites import Failure
from pilotage.localization import Places

MAX_SNIPPET_LINES = 40
_MAX_ERROR_LINES = 12
_MAX_ERROR_LINE = 240
_MAX_TITLE = 100
_MAX_PARAMETER = 160
_OF_PYTEST = frozenset({"Use -v to get more diff", "Use -v to get the full diff"})
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_TEMPORARY = re.compile(r"/tmp/t/[\w.-]+/?|/tmp/(tree|tmpdir|home)/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One failing test, as somebody who knows no tests would tell it."""

    test: str
    """Its id; not told."""
    snippet: str
    error: str
    """Name of the exception's class."""
    message: tuple[str, ...]
    """Lines."""

    @property
    def text(self) -> str:
        """Snippet and error lines, as the issue shows them."""
        message = "\n".join(self.message)
        return f"```python\n{self.snippet}\n```\n\nIt ends with\n\n```\n{message}\n```\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What the text gives away: bare words of a gold place."""

    function: bool
    module: bool
    """Of a class, or of a function on the top level."""
    file: bool
    """The word that a gold file is called after; never its path."""


def symptoms(
    fail_to_pass: Mapping[str, Failure], files: Mapping[str, bytes], hidden: Sequence[re.Pattern[str]]
) -> list[Symptom]:
    """Return what can be told of the failing tests, the shortest text first.

    Args:
        files: path -> content of the tests.
        hidden: what must not be in a text; a test that has it cannot be told.
    """
    found: list[Symptom] = []
    for test, failure in fail_to_pass.items():
        snippet = _snippet(test, failure, files)
        if snippet is None:
            continue
        symptom = Symptom(
            test=test, snippet=snippet, error=failure.error, message=_message_lines(failure.message)
        )
        names = [part.partition("[")[0] for part in test.split("::")[1:]]
        patterns = [*hidden, *(_word(name) for name in names)]
        if not any(pattern.search(symptom.text) for pattern in patterns):
            found.append(symptom)
    return sorted(found, key=lambda symptom: (len(symptom.text), symptom.test))


def hidden_names(gold: Places) -> list[re.Pattern[str]]:
    """Return patterns of what names a gold file: its path, its dotted module, its name with the ending."""
    patterns: list[re.Pattern[str]] = []
    for file in sorted(gold.files):
        path = PurePosixPath(file.removeprefix("src/"))
        dotted = ".".join(path.with_suffix("").parts)
        # A package's __init__ is told by every import of the package; its name tells nothing.
        if path.name != "__init__.py":
            patterns += [_word(dotted), _word(path.name), _word(path.with_suffix("").as_posix())]
    return patterns


def _word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def leaks(text: str, gold: Places) -> Leaks:
    """Return which gold names stand in the text as words."""

    def any_of(names: Iterable[str]) -> bool:
        return any(_word(name).search(text) for name in names)

    stems = (PurePosixPath(file).stem for file in gold.files)
    return Leaks(
        function=any_of(re.split(r"[:.]", place)[-1] for place in gold.functions),
        module=any_of(place.rpartition(":")[2] for place in gold.modules),
        file=any_of(stem for stem in stems if stem != "__init__"),
    )


def issue_text(told: Sequence[Symptom]) -> str:
    """Return the issue: a title, then each symptom; one for each bug."""
    title = told[0].message[0][:_MAX_TITLE]
    if len(told) == 1:
        return f"# {title}\n\nThis does not work as it should:\n\n{told[0].text}"
    parts = [f"## {number}\n\n{symptom.text}" for number, symptom in enumerate(told, 1)]
    return f"# {title}\n\nSeveral things do not work as they should.\n\n" + "\n".join(parts)


def _message_lines(message: str) -> tuple[str, ...]:
    text = _TEMPORARY.sub("", _ADDRESS.sub("0x...", message))
    lines = [
        line[:_MAX_ERROR_LINE].rstrip()
        for line in text.splitlines()
        if line.strip() and line.strip() not in _OF_PYTEST
    ]
    if len(lines) > _MAX_ERROR_LINES:
        lines = [*lines[:_MAX_ERROR_LINES], "..."]
    return tuple(lines) or ("It fails without a message.",)


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> ast.Module | None:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):
        return None


def _snippet(test: str, failure: Failure, files: Mapping[str, bytes]) -> str | None:
    """Return a test's body up to the statement that failed; None where there is none to show.

    (A test that is made at import has no body of its own in the file.)
    """
    path, *names = test.split("::")
    content = files.get(path, b"")
    tree = _parsed(content)
    function = _find(tree, [name.partition("[")[0] for name in names]) if tree else None
    if function is None:
        return None
    body = _without_docstring(function.body)
    lines = content.decode(errors="replace").split("\n")
    if not body or "\t" in lines[body[0].lineno - 1]:
        return None
    failing = _failing(body, failure.line)
    shown = lines[body[0].lineno - 1 : (failing or body[-1]).end_lineno]
    if function.lineno == body[0].lineno or len(shown) > MAX_SNIPPET_LINES:
        return None
    if failing is not None and len(shown) > 1 and not hasattr(failing, "body"):
        shown[-1] += "  # fails here"
    return "\n".join([*_parameters(failure), *textwrap.dedent("\n".join(shown)).split("\n")]).rstrip()


def _find(
    node: ast.Module | ast.ClassDef, names: Sequence[str]
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for child in node.body:
        if (
            isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and child.name == names[0]
        ):
            if isinstance(child, ast.ClassDef):
                return _find(child, names[1:]) if len(names) > 1 else None
            return child if len(names) == 1 else None
    return None


def _without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    match body[0]:
        case ast.Expr(value=ast.Constant(value=str())):
            return body[1:]
        case _:
            return body


def _failing(body: Sequence[ast.stmt], line: int) -> ast.stmt | None:
    """Return the innermost statement around a line."""
    around = [
        node
        for part in body
        for node in ast.walk(part)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return min(around, key=lambda node: (node.end_lineno or 0, -node.lineno), default=None)


def _parameters(failure: Failure) -> Iterator[str]:
    for name, value in sorted(failure.parameters.items()):
        # What has no literal, as `<object at 0x...>`, would be no line of Python.
        if len(value) <= _MAX_PARAMETER and "\n" not in value and " at 0x" not in value and value[0] != "<":
            yield f"{name} = {value}"
