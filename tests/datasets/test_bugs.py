"""Injected bugs: each changes one expression of one function, and no other byte."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.datasets import Bug, find_bugs

SOURCE = '''"""A bag. 3 < 4 in text stays."""
import os

LIMIT = 10


class Bag:
    """Holds  things."""

    size = 3

    def add(self, thing):   # caf\u00e9: \u4e16\u754c, 1 < 2
        if self.\u00e9tat and len(thing) < 7:
            return  self.things
        def inner():
            return 1

    class Nested:
        def hidden(self):
            return self


def top(a, b):
\tif not a: return "s"
\twhile  a : a = b is None
\treturn f"{a < b}"
'''


def bugs_of(source: str) -> list[Bug]:
    return list(find_bugs(source))


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    pairs = zip(before.split("\n"), after.split("\n"), strict=True)
    return [(old, new) for old, new in pairs if old != new]


def found(source: str) -> set[tuple[str, str, str]]:
    """What each bug makes of the one line that it changes."""
    results: set[tuple[str, str, str]] = set()
    for bug in bugs_of(source):
        mutated = bug.applied_to(source)
        assert mutated is not None
        ((old, new),) = changed_lines(source, mutated)
        results.add((bug.kind, old.strip(), new.strip()))
    return results


@pytest.mark.parametrize(
    ("line", "kind", "changed"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a >= b", "comparison", "x = (a > b)"),
        ("x = a == b", "comparison", "x = (a != b)"),
        ("x = a is not b", "comparison", "x = (a is b)"),
        ("x = a in b", "comparison", "x = (a not in b)"),
        ("x = a and b and c", "connective", "x = (a or b or c)"),
        ("x = a or b", "connective", "x = (a and b)"),
        ("x = 1 if ok() else z", "inverted_condition", "x = 1 if (not ok()) else z"),
        ("while not done: pass", "inverted_condition", "while (done): pass"),
        ("x = y[0]", "constant", "x = y[1]"),
        ("return a.b(c)", "lost_result", "return None"),
    ],
)
def test_each_kind_rewrites_its_expression(line: str, kind: str, changed: str) -> None:
    assert (kind, line, changed) in found(f"def f(a, b, c):\n    {line}\n")


@pytest.mark.parametrize(
    "line", ["return", "x = True", "x = 1.5", "x = a < b < c", "while True: pass", "x = '1<2'"]
)
def test_what_has_no_rewrite_is_left_alone(line: str) -> None:
    assert found(f"def f(a, b, c):\n    {line}\n") == set()


def test_a_constant_result_is_changed_but_not_lost() -> None:
    assert found("def f():\n    return 1\n") == {("constant", "return 1", "return 2")}


def test_bugs_are_found_in_functions_and_methods_alone() -> None:
    places = {(bug.class_name, bug.function_name) for bug in bugs_of(SOURCE)}
    assert places == {("Bag", "add"), ("", "top")}  # nothing at module or class level, no nested class


def test_bytes_outside_the_expression_stay() -> None:
    raw = SOURCE.encode()
    bugs = bugs_of(SOURCE)
    assert len(bugs) > 5
    for bug in bugs:
        mutated = bug.applied_to(SOURCE)
        if mutated is None:
            continue
        after = mutated.encode()
        assert after[: bug.start] == raw[: bug.start]
        assert after[len(after) - (len(raw) - bug.end) :] == raw[bug.end :]
        assert after[bug.start : len(after) - (len(raw) - bug.end)] == bug.replacement.encode()


def test_a_rewrite_changes_the_code_of_its_function_and_of_no_other() -> None:
    for bug in bugs_of(SOURCE):
        mutated = bug.applied_to(SOURCE)
        if mutated is not None:
            before, after = (ast.parse(text).body for text in (SOURCE, mutated))
            changed = [
                old.name
                for old, new in zip(before, after, strict=True)
                if isinstance(old, ast.ClassDef | ast.FunctionDef) and ast.dump(old) != ast.dump(new)
            ]
            assert changed == [bug.class_name or bug.function_name]


def test_a_rewrite_that_is_no_python_is_refused() -> None:
    source = "def f(a):\n    return a\n"
    start = source.index("return")
    broken = Bug(kind="x", class_name="", function_name="f", start=start, end=start + 6, replacement="(")
    assert broken.applied_to(source) is None


def test_source_that_is_no_python_is_an_error() -> None:
    with pytest.raises(SyntaxError):
        bugs_of("def f(:\n")


NAMES = st.sampled_from(["a", "bb", "\u00e9t\u00e9", "\u4e16"])
EXPRESSIONS = st.recursive(
    NAMES | st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["<", "==", " and ", " or ", " in "]), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(EXPRESSIONS, st.sampled_from(["", "  # caf\u00e9", "   "])), min_size=1, max_size=4)
)
def test_one_expression_changes_whatever_surrounds_it(lines: list[tuple[str, str]]) -> None:
    body = "".join(f"    x = {expression}{trail}\n" for expression, trail in lines)
    source = f"\n# \u00e4\ndef f(a):\n{body}"
    raw = source.encode()
    for bug in find_bugs(source):
        target = raw[bug.start : bug.end].decode()
        ast.parse(f"({target})", mode="eval")  # the span is an expression of its own
        mutated = bug.applied_to(source)
        assert mutated is not None
        expected = raw[: bug.start] + bug.replacement.encode() + raw[bug.end :]
        assert mutated.encode() == expected
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
