"""The kinds of bugs: each modifier says which nodes of a definition to replace, and by what.

A modifier is pure: from one node and the definition around it to its rewrites, each a few (node, text)
pairs. It sees no positions, and need not break anything: the package's tests decide that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import libcst as cst

from pilotage.datasets.factory.sources import Scope, SourceFile

type Target = cst.CSTNode | tuple[cst.CSTNode, cst.CSTNode]
"""A node, or all from the start of one to the end of another."""
type Rewrite = tuple[tuple[Target, str], ...]
type Modifier = Callable[[cst.CSTNode, Scope, SourceFile], Iterator[Rewrite]]

_OPERATORS: Mapping[type[cst.CSTNode], str] = {
    cst.Add: "-", cst.Subtract: "+", cst.Multiply: "+", cst.Divide: "*", cst.FloorDivide: "/",
    cst.Modulo: "//", cst.Power: "*", cst.LeftShift: ">>", cst.RightShift: "<<", cst.BitAnd: "|",
    cst.BitOr: "&", cst.BitXor: "&", cst.AddAssign: "-=", cst.SubtractAssign: "+=",
    cst.MultiplyAssign: "+=", cst.BitOrAssign: "&=", cst.BitAndAssign: "|=", cst.And: "or", cst.Or: "and",
}  # fmt: skip
_COMPARISONS: Mapping[type[cst.CSTNode], str] = {
    cst.Equal: "!=", cst.NotEqual: "==", cst.LessThan: ">", cst.GreaterThan: "<", cst.LessThanEqual: ">=",
    cst.GreaterThanEqual: "<=", cst.Is: "is not", cst.IsNot: "is", cst.In: "not in", cst.NotIn: "in",
}  # fmt: skip
_BOUNDARIES: Mapping[type[cst.CSTNode], str] = {
    cst.LessThan: "<=", cst.LessThanEqual: "<", cst.GreaterThan: ">=", cst.GreaterThanEqual: ">",
}  # fmt: skip
_ORDERED = (cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power, cst.LeftShift, cst.RightShift)
_CALL_PAIRS = (
    ("startswith", "endswith"), ("min", "max"), ("any", "all"), ("lower", "upper"), ("lstrip", "rstrip"),
    ("strip", "lstrip"), ("find", "rfind"), ("index", "rindex"), ("split", "rsplit"),
    ("append", "appendleft"), ("partition", "rpartition"), ("ljust", "rjust"), ("popleft", "pop"),
    ("keys", "values"),
    ("items", "keys"), ("union", "intersection"), ("add", "discard"), ("update", "setdefault"),
    ("append", "extend"), ("list", "set"), ("sorted", "list"), ("islower", "isupper"), ("floor", "ceil"),
    ("get", "pop"), ("match", "search"), ("start", "end"), ("isdigit", "isalpha"), ("title", "capitalize"),
    ("isinstance", "issubclass"), ("read", "readline"), ("reversed", "list"), ("difference", "union"),
)  # fmt: skip
_EXCEPTIONS = {
    "KeyError": "IndexError", "IndexError": "KeyError", "ValueError": "TypeError",
    "TypeError": "ValueError", "AttributeError": "KeyError", "StopIteration": "IndexError",
}  # fmt: skip


def _paired_calls() -> dict[str, list[str]]:
    pairs: dict[str, list[str]] = {}
    for left, right in _CALL_PAIRS:
        pairs.setdefault(left, []).append(right)
        pairs.setdefault(right, []).append(left)
    return pairs


_SIBLINGS = _paired_calls()


def _is_string(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString)


_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Integer)
_LOOSE = (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.NamedExpr)


def _atom(node: cst.CSTNode, source: SourceFile) -> str:
    """Return an expression's text, in parentheses where an operator beside it might tear it apart."""
    return source.text(node) if isinstance(node, _ATOMS) else f"({source.text(node)})"


def _clause(node: cst.CSTNode, source: SourceFile) -> str:
    """Return the text of a condition, in parentheses only where `not` or `and` needs them."""
    text = source.text(node)
    return f"({text})" if isinstance(node, _LOOSE) or "\n" in text else text


def _without_last(nodes: Sequence[cst.CSTNode], source: SourceFile) -> Rewrite:
    return (((nodes[-2], nodes[-1]), source.text(nodes[-2])),)


def _operator(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.BinaryOperation(left=left, right=right) if _is_string(left) or _is_string(right):
            # Other operators on text fail at once, wherever they stand.
            if isinstance(node.operator, cst.Add):
                yield (left, source.text(right)), (right, source.text(left))
        case cst.BinaryOperation() | cst.BooleanOperation() | cst.AugAssign():
            if text := _OPERATORS.get(type(node.operator)):
                yield ((node.operator, text),)
        case _:
            pass


def _swapped_operands(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.BinaryOperation(left=left, right=right, operator=operator) if isinstance(operator, _ORDERED):
            if not _is_string(left):
                yield (left, source.text(right)), (right, source.text(left))
        case _:
            pass


def _comparison(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.ComparisonTarget(operator=operator) if type(operator) in _COMPARISONS:
            yield ((operator, _COMPARISONS[type(operator)]),)
        case _:
            pass


def _condition(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.If(test=test) | cst.While(test=test) | cst.IfExp(test=test) | cst.CompIf(test=test):
            negated = isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not)
            if not isinstance(test, cst.Comparison) and not negated:
                yield ((test, f"not {_clause(test, source)}"),)
            if isinstance(test, cst.UnaryOperation) and negated:
                yield ((test, _clause(test.expression, source)),)
        case cst.BooleanOperation(left=left, right=right):
            yield ((node, _clause(left, source)),)
            yield ((node, _clause(right, source)),)
        case _:
            pass


def _constant(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.Name(value="True"):
            yield ((node, "False"),)
        case cst.Name(value="False"):
            yield ((node, "True"),)
        case cst.Float(value=value):
            yield ((node, repr(float(value) + 1.0)),)
        case cst.SimpleString(value=value) if len(value) > 3 and value[0] in "\"'" and value[1] != value[0]:
            inside = value[1:-1]
            if inside.isascii() and inside.isprintable() and "\\" not in inside:
                yield ((node, f"{value[0]}{inside[:-1]}{value[-1]}"),)
                if inside.swapcase() != inside:
                    yield ((node, f"{value[0]}{inside.swapcase()}{value[-1]}"),)
        case _:
            pass


def _off_by_one(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.Integer(value=value) if value.isdecimal():
            yield ((node, str(int(value) + 1)),)
            if int(value) > 0:
                yield ((node, str(int(value) - 1)),)
        case cst.ComparisonTarget(operator=operator) if type(operator) in _BOUNDARIES:
            yield ((operator, _BOUNDARIES[type(operator)]),)
        case cst.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, cst.Integer):
                    yield ((bound, f"{_atom(bound, source)} + 1"),)
        case cst.Call(func=cst.Name(value="range"), args=[*_, cst.Arg(value=last, star="")]):
            yield ((last, f"{_atom(last, source)} - 1"),)
        case cst.Call(func=cst.Name(value="len")):
            yield ((node, f"({source.text(node)} - 1)"),)
        case _:
            pass


def _argument(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    if not isinstance(node, cst.Call):
        return
    plain = [arg for arg in node.args if not arg.star and arg.keyword is None]
    for left, right in pairwise(plain):
        yield (left.value, source.text(right.value)), (right.value, source.text(left.value))
    for arg in node.args:
        if arg.keyword is not None and isinstance(arg.value, cst.Name) and arg.value.value not in _CONSTANTS:
            yield ((arg.value, "None"),)
    if len(node.args) > 1 and node.args[-1].keyword is not None:
        yield _without_last(node.args, source)


_CONSTANTS = ("True", "False", "None")


def _return_value(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.Return(value=cst.Tuple(elements=[cst.Element() as first, cst.Element() as second, *_])):
            yield (first.value, source.text(second.value)), (second.value, source.text(first.value))
        case cst.Return(value=cst.Name(value=value)) if value in _CONSTANTS:
            pass
        case cst.Return(value=cst.BaseExpression() as value):
            yield ((value, "None"),)
            if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and not value.args:
                yield ((value, source.text(value.func.value)),)
        case _:
            pass


def _removed_statement(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.SimpleStatementLine(
            body=[cst.Expr(value=cst.Call()) | cst.Assign() | cst.AugAssign() | cst.Continue() | cst.Break()]
        ):
            yield ((node.body[0], "pass"),)
        case cst.SimpleStatementLine(body=[cst.Raise()]):
            yield ((node.body[0], "pass"),)
        case _:
            pass


def _wrong_variable(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    """Take another variable of the function where one is read: in an argument, an operand or an index."""
    others = scope.variables
    read: list[cst.BaseExpression] = []
    match node:
        case cst.Arg(value=cst.Name() as name) | cst.Index(value=cst.Name() as name):
            read = [name]
        case cst.BinaryOperation(left=left, right=right):
            read = [left, right]
        case cst.ComparisonTarget(comparator=comparator):
            read = [comparator]
        case cst.Return(value=cst.Name() as name) | cst.Assign(value=cst.Name() as name):
            read = [name]
        case _:
            pass
    for name in read:
        if isinstance(name, cst.Name) and name.value in others:
            for other in others:
                if other not in (name.value, "self", "cls"):
                    yield ((name, other),)


def _swapped_call(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.Call(func=cst.Attribute(value=cst.Name(value="self"), attr=name)) if (
            name.value in scope.methods
        ):
            arity = scope.methods[name.value]
            for other in sorted(scope.methods):
                own = scope.name.rpartition(".")[2]
                if scope.methods[other] == arity and other not in (name.value, own) and "__" not in other:
                    yield ((name, other),)
        case cst.Call(func=cst.Attribute(attr=name)) | cst.Call(func=cst.Name() as name):
            for other in _SIBLINGS.get(name.value, ()):
                yield ((name, other),)
        case _:
            pass


def _wrong_attribute(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.Attribute(value=cst.Name(value="self"), attr=attribute) if (
            attribute.value in scope.attributes
        ):
            for other in scope.attributes:
                if other != attribute.value:
                    yield ((attribute, other),)
        case _:
            pass


def _statement_order(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    if isinstance(node, cst.IndentedBlock):
        for first, second in pairwise(node.body):
            if _is_simple(first) and _is_simple(second):
                yield (first, source.text(second)), (second, source.text(first))


def _is_simple(node: cst.CSTNode) -> bool:
    match node:
        case cst.SimpleStatementLine(body=[cst.Assign() | cst.AugAssign() | cst.Expr(value=cst.Call())]):
            return True
        case _:
            return False


def _exception(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.ExceptHandler(type=cst.Name() as name):
            pass
        case cst.Raise(exc=cst.Call(func=cst.Name() as name) | (cst.Name() as name)):
            pass
        case _:
            return
    if other := _EXCEPTIONS.get(name.value):
        yield ((name, other),)


FUNCTION_MODIFIERS: Mapping[str, Modifier] = {
    "operator": _operator,
    "swapped_operands": _swapped_operands,
    "comparison": _comparison,
    "condition": _condition,
    "constant": _constant,
    "off_by_one": _off_by_one,
    "argument": _argument,
    "return_value": _return_value,
    "removed_statement": _removed_statement,
    "wrong_variable": _wrong_variable,
    "swapped_call": _swapped_call,
    "wrong_attribute": _wrong_attribute,
    "statement_order": _statement_order,
    "exception": _exception,
}
"""Kind -> modifier of the nodes of a function."""


def _class_attribute(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    yield from _constant(node, scope, source)
    yield from _off_by_one(node, scope, source)


def _class_base(node: cst.CSTNode, scope: Scope, source: SourceFile) -> Iterator[Rewrite]:
    match node:
        case cst.ClassDef(bases=[cst.Arg(value=base)]):
            if source.text(base) != "object":
                yield ((base, "object"),)
        case cst.ClassDef(bases=[_, _, *_] as bases):
            yield _without_last(bases, source)
        case _:
            pass


CLASS_MODIFIERS: Mapping[str, Modifier] = {"class_attribute": _class_attribute, "class_base": _class_base}
"""Kind -> modifier of the nodes of a class's own statements, those of its methods left out."""
