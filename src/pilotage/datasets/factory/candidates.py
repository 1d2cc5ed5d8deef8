"""Every bug that the modifiers know for a package, and the seeded order in which they are tried."""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from pilotage.datasets.factory.modifiers import CLASS_MODIFIERS, FUNCTION_MODIFIERS, Modifier, Target
from pilotage.datasets.factory.sources import Edit, Scope, SourceFile, applied, children, overlap, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One bug that nobody has proven."""

    path: str
    place: str
    """`function`, `Class.method` or `Class`, the outermost definition that changes."""
    kind: str
    edits: tuple[Edit, ...]
    lines: tuple[int, int]
    """First and last line, from 1, that a test must pass to see the bug."""

    @property
    def definition(self) -> tuple[str, str]:
        """Where it is: path and place."""
        return self.path, self.place


def applied_to(clean: Mapping[str, bytes], candidates: Sequence[Candidate]) -> dict[str, bytes] | None:
    """Return path -> content of the files that change; None where that is no Python, or edits overlap."""
    changed: dict[str, bytes] = {}
    for path in sorted({candidate.path for candidate in candidates}):
        edits = [edit for candidate in candidates if candidate.path == path for edit in candidate.edits]
        if overlap(edits):
            return None
        changed[path] = applied(clean[path], edits)
        try:
            ast.parse(changed[path])
        except (SyntaxError, ValueError):
            return None
    return changed


def find_candidates(source: SourceFile) -> Iterator[Candidate]:
    """Yield every rewrite that a modifier knows for a file's functions and classes."""
    seen: set[tuple[Edit, ...]] = set()
    for scope in source.scopes():
        for kind, edits, lines in _in_scope(scope, source):
            # Two kinds may come to the same text.
            if edits not in seen and not _is_nothing(edits, source) and not overlap(edits):
                seen.add(edits)
                yield Candidate(path=source.path, place=scope.name, kind=kind, edits=edits, lines=lines)


type _Found = tuple[str, tuple[Edit, ...], tuple[int, int]]


def _is_nothing(edits: Sequence[Edit], source: SourceFile) -> bool:
    return all(source.content[edit.start : edit.end] == edit.text.encode() for edit in edits)


def _in_scope(scope: Scope, source: SourceFile) -> Iterator[_Found]:
    if isinstance(scope.node, cst.ClassDef):
        whole = source.lines(scope.node)
        own = [scope.node, *(node for part in _own_statements(scope.node) for node in walk(part))]
        for node in own:
            for kind, edits in _rewrites(node, CLASS_MODIFIERS, scope, source):
                yield kind, edits, whole
        return
    body = source.lines(scope.node.body)
    for edit in _decorators(scope.node, source):
        yield "decorator", (edit,), body
    for node in walk(scope.node.params):
        # Defaults are computed at import, so the tests that call the function are those of its body.
        for kind, edits in _rewrites(node, FUNCTION_MODIFIERS, scope, source):
            yield kind, edits, body
    for node, first_line in _statement_nodes(scope.node.body, source):
        for kind, edits in _rewrites(node, FUNCTION_MODIFIERS, scope, source):
            yield kind, edits, (first_line, _last_line(edits, source))


def _rewrites(
    node: cst.CSTNode, modifiers: Mapping[str, Modifier], scope: Scope, source: SourceFile
) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    for kind, modifier in modifiers.items():
        for rewrite in modifier(node, scope, source):
            yield kind, tuple(sorted(_edit(target, text, source) for target, text in rewrite))


def _edit(target: Target, text: str, source: SourceFile) -> Edit:
    first, last = target if isinstance(target, tuple) else (target, target)
    return source.edit(first, last, text)


def _last_line(edits: Sequence[Edit], source: SourceFile) -> int:
    return max(source.line(max(edit.start, edit.end - 1)) for edit in edits)


def _own_statements(node: cst.ClassDef) -> Iterator[cst.CSTNode]:
    for statement in node.body.body:
        if isinstance(statement, cst.SimpleStatementLine) and not _is_docstring(statement):
            yield statement


def _is_docstring(node: cst.CSTNode) -> bool:
    match node:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]):
            return True
        case _:
            return False


def _statement_nodes(body: cst.CSTNode, source: SourceFile) -> Iterator[tuple[cst.CSTNode, int]]:
    """Yield (node, first line of the innermost statement around it) for a body, docstrings left out."""
    yield body, source.lines(body)[0]

    def inside(node: cst.CSTNode, line: int) -> Iterator[tuple[cst.CSTNode, int]]:
        for child in children(node):
            if isinstance(child, cst.Annotation) or _is_docstring(child):
                continue
            is_statement = isinstance(child, cst.SimpleStatementLine | cst.BaseCompoundStatement)
            child_line = source.lines(child)[0] if is_statement else line
            yield child, child_line
            yield from inside(child, child_line)

    yield from inside(body, source.lines(body)[0])


def _decorators(node: cst.FunctionDef, source: SourceFile) -> Iterator[Edit]:
    """Yield the removal of each decorator, up to the next one or to the `def`."""
    following = [*node.decorators, node][1:]
    for decorator, after in zip(node.decorators, following, strict=True):
        yield Edit(source.start(decorator), source.start(after), "")


def in_random_order(candidates: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """Return all candidates so that every (definition, kind) comes once before any comes twice.

    A function with hundreds of constants thus weighs no more than one with a single comparison.
    """
    groups: dict[tuple[str, str, str], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((*candidate.definition, candidate.kind), []).append(candidate)
    for key in sorted(groups):
        rng.shuffle(groups[key])
    ordered: list[Candidate] = []
    for turn in range(max(map(len, groups.values()), default=0)):
        keys = [key for key in sorted(groups) if turn < len(groups[key])]
        rng.shuffle(keys)
        ordered += [groups[key][turn] for key in keys]
    return ordered
