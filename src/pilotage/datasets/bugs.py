"""Inject one bug into Python source by rewriting one expression of its syntax tree.

Only the expression's own characters change: every other byte of the file stays, so that neither layout
nor comments tell where the bug is. Whether a bug breaks behaviour is not proven here.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One expression to rewrite."""

    kind: str
    """comparison, connective, inverted_condition, constant or lost_result."""
    class_name: str
    """Outermost class that holds it; empty for a top-level function."""
    function_name: str
    """Outermost function or method that holds it."""
    start: int
    """Byte offset of the expression in the file."""
    end: int
    replacement: str

    def applied_to(self, source: str) -> str | None:
        """Return the file with the bug in it, or None where that is no Python.

        (Positions inside an f-string are the string's own, so a rewrite there may not parse.)
        """
        raw = source.encode()
        mutated = (raw[: self.start] + self.replacement.encode() + raw[self.end :]).decode()
        try:
            ast.parse(mutated)
        except SyntaxError:
            return None
        return mutated


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def _comparison(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        op = _COMPARISONS[type(node.ops[0])]()
        yield node, ast.Compare(left=node.left, ops=[op], comparators=node.comparators)


def _connective(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.BoolOp):
        op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, ast.BoolOp(op=op, values=node.values)


def _inverted_condition(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(
        node.test, ast.Compare | ast.Constant
    ):
        inverted = (
            node.test.operand if isinstance(node.test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node.test)
        )
        yield node.test, inverted


def _constant(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, ast.Constant(value=node.value + 1)


def _lost_result(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node.value, ast.Constant(value=None)


_REWRITES: dict[str, Callable[[ast.AST], Iterator[tuple[ast.expr, ast.expr]]]] = {
    "comparison": _comparison,
    "connective": _connective,
    "inverted_condition": _inverted_condition,
    "constant": _constant,
    "lost_result": _lost_result,
}


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (class, function) for top-level functions (no class) and methods of top-level classes."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "", statement
        elif isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield statement.name, member


def _byte_offsets(source: str) -> list[int]:
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _text(replacement: ast.expr) -> str:
    text = ast.unparse(ast.fix_missing_locations(replacement))
    # Precedence of the surroundings is unknown, hence the parentheses.
    return text if isinstance(replacement, ast.Constant) else f"({text})"


def find_bugs(source: str) -> Iterator[Bug]:
    """Yield every one-expression rewrite of a file's functions, in source order.

    Args:
        source: Python source, without a form feed (which `ast` and `splitlines` count differently).
    """
    offsets = _byte_offsets(source)
    for class_name, function in functions_of(ast.parse(source)):
        in_body = (node for statement in function.body for node in ast.walk(statement))
        found = (
            (kind, target, replacement)
            for node in in_body
            for kind, rewrite in _REWRITES.items()
            for target, replacement in rewrite(node)
        )
        for kind, target, replacement in found:
            assert target.end_lineno is not None
            assert target.end_col_offset is not None
            yield Bug(
                kind=kind,
                class_name=class_name,
                function_name=function.name,
                start=offsets[target.lineno - 1] + target.col_offset,
                end=offsets[target.end_lineno - 1] + target.end_col_offset,
                replacement=_text(replacement),
            )
