"""Gold places from two versions of a tree, by comparing syntax trees and never diff lines; or from a row.

Rules: names that exist in *before* are gold where their code differs; comments, layout and docstrings are
no code; a nested function counts as its outermost function or method, a nested class as its outermost
class (module only); a class changed outside its methods is a module only; what the change creates is not
gold, but a method added to an old class makes that class a module; only `.py` files count.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache

from pilotage.localization.parsing import parse
from pilotage.localization.scoring import Places

type _Code = list[str]
"""Dumps of the definitions that share one name, in order."""


@dataclass(slots=True)
class _Outline:
    """A file's code by name, docstrings and positions removed."""

    whole: str = ""
    functions: dict[str, _Code] = field(default_factory=dict[str, _Code])
    """`function` or `Class.method` -> code."""
    class_rest: dict[str, _Code] = field(default_factory=dict[str, _Code])
    """Class -> what it holds besides its methods and imports, and the order of its methods."""


class _DropDocstrings(ast.NodeTransformer):
    def _visit_body[T: (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)](self, node: T) -> T:
        self.generic_visit(node)
        first = node.body[0] if node.body else None
        match first:
            case ast.Expr(value=ast.Constant(value=str())):
                node.body = node.body[1:] or [ast.Pass()]
            case _:
                pass
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _visit_body


def _scope_members(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, those under if, try, with, for and match included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _scope_members(getattr(statement, name, []))
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _scope_members(part.body)


class _WithoutMethods(ast.NodeTransformer):
    """Reduces a class to what is not the inside of a method: methods become their bare names."""

    def _name_only(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
        return ast.Expr(ast.Name(id=f"def {node.name}"))

    visit_FunctionDef = visit_AsyncFunctionDef = _name_only

    def _nothing(self, node: ast.stmt) -> ast.stmt:
        return ast.Pass()

    visit_Import = visit_ImportFrom = _nothing


def _rest_of_class(node: ast.ClassDef) -> str:
    """Dump a class without its methods' insides; a nested class counts whole, as part of the outer one."""
    parts = [ast.dump(part) for part in [*node.bases, *node.keywords, *node.decorator_list]]
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(f"def {member.name}")
        elif isinstance(member, ast.ClassDef):
            parts.append(ast.dump(member))
        else:
            parts.append(ast.dump(_WithoutMethods().visit(deepcopy(member))))
    return "\n".join(parts)


@lru_cache(maxsize=64)  # the clean tree is compared with many buggy ones
def _outline(source: str) -> _Outline | None:
    """Return the outline, or None where the source does not parse."""
    parsed = parse(source)
    if parsed is None:
        return None
    tree = _DropDocstrings().visit(parsed)
    outline = _Outline(whole=ast.dump(tree))
    for member in _scope_members(tree.body):
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            outline.functions.setdefault(member.name, []).append(ast.dump(member))
        elif isinstance(member, ast.ClassDef):
            for method in _scope_members(member.body):
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{member.name}.{method.name}"
                    outline.functions.setdefault(name, []).append(ast.dump(method))
            outline.class_rest.setdefault(member.name, []).append(_rest_of_class(member))
    return outline


def _file_places(path: str, before: _Outline, after: _Outline) -> tuple[set[str], set[str]]:
    """Return (modules, functions) of one file that both versions hold and parse."""
    functions = {name for name, code in before.functions.items() if after.functions.get(name) != code}
    classes = {name for name, code in before.class_rest.items() if after.class_rest.get(name) != code}
    modules = {name.partition(".")[0] for name in functions} | classes
    return {f"{path}:{name}" for name in modules}, {f"{path}:{name}" for name in functions}


def gold_places(before: Mapping[str, str], after: Mapping[str, str]) -> Places:
    """Return the places in *before* that turn it into *after*.

    Args:
        before: path -> source of the tree that the agent sees (buggy).
        after: path -> source of the fixed tree.

    Returns:
        Places named as in *before*; linear in the size of the changed files.
    """
    files: set[str] = set()
    modules: set[str] = set()
    functions: set[str] = set()
    for path, source in before.items():
        fixed = after.get(path)
        if not path.endswith(".py") or fixed == source:
            continue
        old, new = _outline(source), _outline(fixed) if fixed is not None else None
        if old is not None and new is not None:
            if old.whole == new.whole:
                continue
            changed_modules, changed_functions = _file_places(path, old, new)
            modules |= changed_modules
            functions |= changed_functions
        files.add(path)
    return Places(files=frozenset(files), modules=frozenset(modules), functions=frozenset(functions))


def gold_of_changes(file_changes: Iterable[Mapping[str, object]]) -> Places:
    """Return the places that a row's `file_changes` name: its files, and what it calls edited.

    `edited_modules` and `edited_entities` may be null, which means none; what was added counts for nothing.

    Raises:
        ValueError: a place does not start with its own file.
    """
    files: set[str] = set()
    modules: set[str] = set()
    functions: set[str] = set()
    for change in file_changes:
        path, edits = str(change["file"]), change["changes"]
        assert isinstance(edits, Mapping)
        files.add(path)
        for level, key in ((modules, "edited_modules"), (functions, "edited_entities")):
            for place in edits.get(key) or ():
                if not place.startswith(f"{path}:"):
                    raise ValueError(f"gold place {place!r} is not in its file {path!r}")
                level.add(place)
    return Places(files=frozenset(files), modules=frozenset(modules), functions=frozenset(functions))
