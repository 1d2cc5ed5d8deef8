"""Gold places: one small edit a case, numbered; the rules are in `docs/explanation.md`."""

import random
from dataclasses import dataclass

import pytest

from pilotage.localization import gold_places

BEFORE = '''import os
LIMIT = 1

def h(x):
    """Doc."""
    return x + 1

def g(a=1):
    return a

def o():
    def inner():
        return 1
    class Local:
        def q(self):
            return 2
    return inner

class A(Base):
    """Doc."""
    size = 3
    def __init__(self):
        self.v = 0
    def g(self):
        def closure():
            return 3
        return closure
    def h(self):
        return 4
    class Nested:
        def q(self):
            return 5

class B:
    def g(self):
        return 6
'''
A_H = "    def h(self):\n        return 4\n"
OVERLOAD = "@overload\ndef g(a: int): ...\n"


@dataclass(frozen=True)
class Case:
    number: int
    after: str | dict[str, str]
    """Of `m.py`, or of the whole tree."""
    files: str = ""
    modules: str = ""
    functions: str = ""
    before: str | dict[str, str] = BEFORE


def edited(*pairs: tuple[str, str], source: str = BEFORE) -> str:
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def edit(old: str, new: str) -> str:
    return edited((old, new))


DECORATED = "@cache\ndef g():\n    return 1\n"
CLASS_DECORATED = "@d(1)\nclass A:\n    def g(self):\n        return 1\n"
PROPERTY = (
    "class A:\n    @property\n    def v(self):\n        return 1\n"
    "    @v.setter\n    def v(self, x):\n        self.x = x\n"
)
TWICE = "if x:\n    def g():\n        return 1\nelse:\n    def g():\n        return 2\n"
GUARDED = "if x:\n    def g():\n        return 1\n"
LAMBDAS = "f = lambda: 1\nclass A:\n    k = lambda: 2\n"
INNER_IMPORT = "def g():\n    import os\n    return os\nclass A:\n    import os\n"
MAIN = "__all__ = ['a']\ntype T = int\nif __name__ == '__main__':\n    run(1)\n"
MATCHED = (
    "match x:\n    case 1:\n        def g():\n            return 1\n"
    "try:\n    pass\nexcept E:\n    def k():\n        return 1\n"
)
MOVED = "class A:\n    def g(self):\n        return 1\nclass B:\n    pass\n"
MOVED_AFTER = "class A:\n    pass\nclass B:\n    def g(self):\n        return 1\n"
CLOSED = "class A:\n    def g(self):\n        return 1\n"
TWO = {"m.py": "def g():\n    return 1\n", "n.py": "class A:\n    def q(self):\n        return 1\n"}

CASES = [
    Case(1, edit("return closure\n", "return closure()\n"), "m.py", "m.py:A", "m.py:A.g"),
    Case(2, edit("x + 1", "x - 1"), "m.py", "m.py:h", "m.py:h"),
    Case(3, edit("self.v = 0", "self.v = 1"), "m.py", "m.py:A", "m.py:A.__init__"),
    Case(
        4, edited(("return 3", "return 9"), ("return 4", "return 9")), "m.py", "m.py:A", "m.py:A.g m.py:A.h"
    ),
    Case(5, edit(A_H, A_H + "    def new(self):\n        pass\n"), "m.py", "m.py:A"),
    Case(6, BEFORE + "def new():\n    pass\n", "m.py"),
    Case(7, BEFORE + "class New:\n    def q(self):\n        pass\n", "m.py"),
    Case(8, edit("LIMIT = 1", "LIMIT = 2"), "m.py"),
    Case(9, edit("import os", "import sys"), "m.py"),
    Case(10, edit("size = 3", "size = 4"), "m.py", "m.py:A"),
    Case(11, edit("A(Base)", "A(Base, Other)"), "m.py", "m.py:A"),
    Case(12, "def g():\n    return 1\n", "m.py", "m.py:g", "m.py:g", before=DECORATED),
    Case(13, CLASS_DECORATED.replace("@d(1)", "@d(2)"), "m.py", "m.py:A", before=CLASS_DECORATED),
    Case(14, edit("return 1\n    class Local", "return 9\n    class Local"), "m.py", "m.py:o", "m.py:o"),
    Case(15, edit("return 3", "return 9"), "m.py", "m.py:A", "m.py:A.g"),
    Case(16, edit("return 5", "return 9"), "m.py", "m.py:A"),
    Case(17, edit("return 2", "return 9"), "m.py", "m.py:o", "m.py:o"),
    Case(18, BEFORE.replace('"""Doc."""', '"""Other."""')),
    Case(19, edit("LIMIT = 1\n", "LIMIT = 1  # most\n\n\n# more\n")),
    Case(20, edited(("LIMIT = 1", "LIMIT = 0x1"), ("(a=1)", "( a = (1) )"))),
    Case(21, BEFORE.replace("\n", "\r\n").rstrip()),
    Case(22, edit("def g(a=1)", "def g2(a=1)"), "m.py", "m.py:g", "m.py:g"),
    Case(23, edit("class B:", "class C:"), "m.py", "m.py:B", "m.py:B.g"),
    Case(24, edit("(a=1)", "(a: int = 1)"), "m.py", "m.py:g", "m.py:g"),
    Case(25, "async def g():\n    return 2\n", "m.py", "m.py:g", "m.py:g", "async def g():\n    return 1\n"),
    Case(26, edited(("self.x = x", "self.x = 0"), source=PROPERTY), "m.py", "m.py:A", "m.py:A.v", PROPERTY),
    Case(27, edited(("return 2", "return 9"), source=TWICE), "m.py", "m.py:g", "m.py:g", TWICE),
    Case(28, edited(("if x", "if not x"), source=GUARDED), "m.py", before=GUARDED),
    Case(29, edited((A_H, ""), ("    size = 3\n", f"    size = 3\n{A_H}")), "m.py", "m.py:A"),
    Case(30, edit(A_H, ""), "m.py", "m.py:A", "m.py:A.h"),
    Case(31, {"m.py": BEFORE, "o.py": "def g():\n    pass\n"}),
    Case(32, {"m.py": BEFORE}, "o.py", before={"m.py": BEFORE, "o.py": "def g():\n    pass\n"}),
    Case(33, {"t.txt": "b", "m.pyi": "y: int"}, before={"t.txt": "a", "m.pyi": "x: int"}),
    Case(
        34,
        {path: source.replace("return 1", "return 2") for path, source in TWO.items()},
        "m.py n.py",
        "m.py:g n.py:A",
        "m.py:g n.py:A.q",
        TWO,
    ),
    Case(35, BEFORE, "m.py", before=edit("def h(x):", "def h(x:")),
    Case(36, edit("return 6", "return 9"), "m.py", "m.py:B", "m.py:B.g"),
    Case(37, edited(("lambda: 1", "lambda: 3"), source=LAMBDAS), "m.py", before=LAMBDAS),
    Case(37, edited(("lambda: 2", "lambda: 3"), source=LAMBDAS), "m.py", "m.py:A", before=LAMBDAS),
    Case(
        38,
        edited(("import os\n    return", "import os, re\n    return"), source=INNER_IMPORT),
        "m.py",
        "m.py:g",
        "m.py:g",
        INNER_IMPORT,
    ),
    Case(
        39,
        edited(("A:\n    import os", "A:\n    import re"), source=INNER_IMPORT),
        "m.py",
        before=INNER_IMPORT,
    ),
    Case(40, edited(("run(1)", "run(2)"), source=MAIN), "m.py", before=MAIN),
    Case(40, edited(("['a']", "['b']"), source=MAIN), "m.py", before=MAIN),
    Case(40, edited(("T = int", "T = str"), source=MAIN), "m.py", before=MAIN),
    Case(41, {"n.py": BEFORE}, "m.py"),
    Case(41, {"n.py": edit("x + 1", "x - 1")}, "m.py"),
    Case(42, "\ufeff" + edit("x + 1", "x - 1"), "m.py", "m.py:h", "m.py:h", "\ufeff" + BEFORE),
    Case(43, edit("def g(a=1)", f"{OVERLOAD}def g(a=1)"), "m.py", "m.py:g", "m.py:g"),
    Case(44, MOVED_AFTER, "m.py", "m.py:A m.py:B", "m.py:A.g", MOVED),
    Case(
        45,
        {"m.py": "import n\n", "n.py": "x = 1\ndef g():\n    pass\n"},
        "m.py n.py",
        "m.py:g",
        "m.py:g",
        {"m.py": "import n\ndef g():\n    pass\n", "n.py": "x = 1\n"},
    ),
    Case(46, MATCHED.replace("return 1", "return 2"), "m.py", "m.py:g m.py:k", "m.py:g m.py:k", MATCHED),
    Case(47, "x = 1\n", "m.py", "m.py:A", "m.py:A.g", "x = 1\n" + CLOSED),
    Case(48, f"import re\n{CLOSED}    def n(self):\n        return re\n", "m.py", "m.py:A", before=CLOSED),
]


def tree(sources: str | dict[str, str]) -> dict[str, str]:
    return sources if isinstance(sources, dict) else {"m.py": sources}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_an_edit_names_the_places_that_exist_before_it(case: Case) -> None:
    places = gold_places(tree(case.before), tree(case.after))

    assert places.files == set(case.files.split())
    assert places.modules == set(case.modules.split())
    assert places.functions == set(case.functions.split())


def test_every_rule_has_a_case() -> None:
    assert sorted({case.number for case in CASES}) == list(range(1, 49))


def test_a_byte_order_mark_alone_changes_nothing() -> None:
    assert not gold_places({"m.py": BEFORE}, {"m.py": "\ufeff" + BEFORE}).files


def test_a_fix_that_does_not_parse_names_the_file_alone() -> None:
    places = gold_places({"m.py": BEFORE}, {"m.py": "def broken(:\n"})
    assert (places.files, places.modules, places.functions) == ({"m.py"}, set(), set())


def test_only_changed_files_are_parsed() -> None:
    """Linear time on a large tree: what did not change costs a comparison, even where it does not parse."""
    before = {f"p{index}/m.py": f"def broken{index}(:\n" for index in range(10_000)}
    before["q.py"] = BEFORE
    after = before | {"q.py": edit("x + 1", "x - 1")}
    order = list(after)
    random.Random(0).shuffle(order)

    assert gold_places(before, {path: after[path] for path in order}).functions == {"q.py:h"}
