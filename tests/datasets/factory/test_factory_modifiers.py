"""Modifiers: an example of each kind, and no byte changed outside."""

import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.datasets.factory.toy import SOURCES

from pilotage.datasets.factory.candidates import Candidate, applied_to, find_candidates, in_random_order
from pilotage.datasets.factory.modifiers import CLASS_MODIFIERS, FUNCTION_MODIFIERS
from pilotage.datasets.factory.sources import Edit, SourceFile, applied, overlap


def candidates_of(source: str) -> list[Candidate]:
    return list(find_candidates(SourceFile("m.py", source.encode())))


def results(source: str, kind: str) -> list[str]:
    """What a kind makes of a source, without what is no Python."""
    clean = {"m.py": source.encode()}
    changed = [applied_to(clean, [found]) for found in candidates_of(source) if found.kind == kind]
    return [files["m.py"].decode() for files in changed if files is not None]


BODY = "def f(self, a, b, c=1):\n    {}\n"
FUNCTION_EXAMPLES = [
    ("operator", "x = a  +  b", "x = a  -  b"),
    ("operator", "x = 'n' + a", "x = a + 'n'"),
    ("operator", "a += b", "a -= b"),
    ("operator", "x = a and b", "x = a or b"),
    ("swapped_operands", "x = a // b[1]", "x = b[1] // a"),
    ("comparison", "x = a == b", "x = a != b"),
    ("comparison", "x = a not in b", "x = a in b"),
    ("comparison", "x = a < b", "x = a > b"),
    ("condition", "if a: pass", "if not a: pass"),
    ("condition", "if not (a): pass", "if a: pass"),
    ("condition", "if a and b: pass", "if a: pass"),
    ("condition", "while a or b: pass", "while not (a or b): pass"),
    ("condition", "x = [i for i in a if i.ok]", "x = [i for i in a if not i.ok]"),
    ("constant", "x = g(a, key=True)", "x = g(a, key=False)"),
    ("constant", "x = 'Name'", "x = 'Nam'"),
    ("constant", "x = 'Name'", "x = 'nAME'"),
    ("constant", "x = 1.5", "x = 2.5"),
    ("off_by_one", "x = a[1]", "x = a[2]"),
    ("off_by_one", "x = a[1]", "x = a[0]"),
    ("off_by_one", "x = a <= b", "x = a < b"),
    ("off_by_one", "x = a[: b + c]", "x = a[: (b + c) + 1]"),
    ("off_by_one", "x = range(1, a)", "x = range(1, a - 1)"),
    ("off_by_one", "x = len(a)", "x = (len(a) - 1)"),
    ("argument", "g(a, b)", "g(b, a)"),
    ("argument", "g(a, key=b)", "g(a, key=None)"),
    ("argument", "g(a, key=2)", "g(a)"),
    ("return_value", "return a.b(c)", "return None"),
    ("return_value", "return a, b", "return b, a"),
    ("return_value", "return a.copy()", "return a"),
    ("removed_statement", "a.add(b)  # kept", "pass  # kept"),
    ("removed_statement", "raise ValueError", "pass"),
    ("wrong_variable", "g(a)", "g(b)"),
    ("wrong_variable", "x = c - a", "x = c - b"),
    ("swapped_call", "x = a.startswith(b)", "x = a.endswith(b)"),
    ("swapped_call", "x = max(a)", "x = min(a)"),
    ("statement_order", "x = a; y = b\n    g(x)\n    h(y)", "x = a; y = b\n    h(y)\n    g(x)"),
    ("exception", "raise KeyError(a)", "raise IndexError(a)"),
    ("exception", "try: g()\n    except ValueError: pass", "try: g()\n    except TypeError: pass"),
]


@pytest.mark.parametrize(("kind", "line", "changed"), FUNCTION_EXAMPLES)
def test_a_kind_rewrites_a_function(kind: str, line: str, changed: str) -> None:
    assert BODY.format(changed) in results(BODY.format(line), kind)


CLASS = """class A(B, C):
    size = 3

    def f(self):
        self.x = self.y
        self.y = self.read_only
        return self.g(1)

    def g(self, a): pass

    def h(self, a): pass

    @property
    def v(self): pass
"""


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("class_attribute", "size = 3", "size = 2"),
        ("class_base", "(B, C)", "(B)"),
        ("decorator", "@property\n    def v", "def v"),
        ("swapped_call", "self.g(1)", "self.h(1)"),
        ("wrong_attribute", "= self.y", "= self.x"),
    ],
)
def test_a_kind_rewrites_a_class(kind: str, old: str, new: str) -> None:
    assert CLASS.replace(old, new) in results(CLASS, kind)


def test_a_class_without_another_base_gets_object() -> None:
    assert results("class A(B):\n    pass\n", "class_base") == ["class A(object):\n    pass\n"]


def test_every_kind_has_an_example() -> None:
    shown = {kind for kind, _, _ in FUNCTION_EXAMPLES}
    assert shown | {"wrong_attribute"} == set(FUNCTION_MODIFIERS)
    assert {"class_attribute", "class_base"} == set(CLASS_MODIFIERS)


@pytest.mark.parametrize(
    "source",
    [
        "x = 1 + 2\n",  # of no function
        'def f():\n    """1 < 2, True."""\n',
        "def f(a: 'Name') -> 'Other': ...\n",
        "def f():\n    return None\n",
    ],
)
def test_what_no_modifier_knows_is_left_alone(source: str) -> None:
    assert candidates_of(source) == []


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfx = 1\n", b"x = 1\r", b"\fx = 1\n", b"x =", b"# \xff\n"])
def test_a_file_whose_offsets_may_be_wrong_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        SourceFile("m.py", content)


def test_windows_line_ends_and_wide_characters_stay() -> None:
    source = "def f(a):\r\n    x = '\u4e16\u754c'; return a + 1  # caf\u00e9\r\n"
    assert source.replace("a + 1", "a - 1") in results(source, "operator")


def test_a_candidate_knows_its_place_and_the_lines_that_a_test_must_pass() -> None:
    found = {(item.kind, item.place, item.lines) for item in candidates_of(SOURCES["toybox/counts.py"])}
    assert ("class_attribute", "Counter", (4, 26)) in found
    assert ("comparison", "Counter.up", (16, 16)) in found
    assert ("off_by_one", "Counter.up", (14, 19)) in found  # a default: the lines of the body
    assert ("decorator", "Counter.is_full", (26, 26)) in found


def test_what_is_no_python_is_refused() -> None:
    clean = {"m.py": b"def f():\n    return 1\n"}
    broken = Candidate(path="m.py", place="f", kind="x", edits=(Edit(13, 19, "("),), lines=(2, 2))
    assert applied_to(clean, [broken]) is None


def test_two_bugs_in_one_file_are_both_made_and_overlapping_ones_refused() -> None:
    clean = {"m.py": b"def f(a):\n    return a + 1\n"}
    by_kind = {item.kind: item for item in candidates_of(clean["m.py"].decode())}
    both = applied_to(clean, [by_kind["operator"], by_kind["off_by_one"]])
    assert both == {"m.py": b"def f(a):\n    return a - 0\n"}
    assert applied_to(clean, [by_kind["operator"], by_kind["return_value"]]) is None


def test_the_order_depends_on_the_seed_and_every_kind_of_a_definition_comes_before_a_second() -> None:
    found = candidates_of(SOURCES["toybox/counts.py"])
    orders = [in_random_order(found, random.Random(seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == len(found) == len(set(orders[0]))
    groups = {(item.place, item.kind) for item in found}
    assert {(item.place, item.kind) for item in orders[0][: len(groups)]} == groups


LINES = st.lists(
    st.sampled_from([line for _, line, _ in FUNCTION_EXAMPLES if "\n" not in line]), min_size=1, max_size=4
)


@given(LINES, st.sampled_from(["", "  # caf\u00e9", "   "]), st.sampled_from(["\n", "\r\n"]))
def test_no_byte_outside_the_edits_changes(lines: list[str], trail: str, end: str) -> None:
    text = "".join(f"    {line}{trail}{end}" for line in lines)
    source = f"# \u00e4{end}def f(a,  b, c):{end}{text}def g(): return  1{end}"
    clean = source.encode()
    found = candidates_of(source)
    assert found
    for candidate in found:
        mutated = applied(clean, candidate.edits)
        at, at_clean = 0, 0
        for edit in candidate.edits:  # sorted: walk both files from one edit to the next
            kept = clean[at_clean : edit.start]
            assert mutated[at : at + len(kept)] == kept
            at += len(kept) + len(edit.text.encode())
            at_clean = edit.end
        assert mutated[at:] == clean[at_clean:]
        if applied_to({"m.py": clean}, [candidate]):
            ast.parse(mutated)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=4))
def test_edits_that_touch_no_common_byte_do_not_overlap(pieces: list[tuple[int, int]]) -> None:
    edits = [Edit(start, start + size, "x") for start, size in pieces]
    touched = [set(range(edit.start, edit.end + 1)) for edit in edits]
    common = any(touched[i] & touched[j] for i in range(len(edits)) for j in range(len(edits)) if i != j)
    assert overlap(edits) == common
