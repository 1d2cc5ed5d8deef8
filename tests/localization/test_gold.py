"""Gold places: the rule table, one small edit a row."""

import pytest

from pilotage.localization import gold_places

BEFORE = '''import os
LIMIT = 1

def h(x):
    """Doc."""
    def inner():
        return 1
    return x + inner()

class A(Base):
    """Doc."""
    size = 3
    def __init__(self):
        self.v = 0
    def g(self):
        return 2
    class B:
        def q(self):
            return 4
'''


def edit(old: str, new: str) -> str:
    assert BEFORE.count(old) == 1
    return BEFORE.replace(old, new)


@pytest.mark.parametrize(
    ("after", "files", "modules", "functions"),
    [
        (edit("return 2", "return 3"), {"m.py"}, {"m.py:A"}, {"m.py:A.g"}),
        (edit("x + inner", "x - inner"), {"m.py"}, {"m.py:h"}, {"m.py:h"}),
        (edit("return 1", "return 7"), {"m.py"}, {"m.py:h"}, {"m.py:h"}),
        (edit("self.v = 0", "self.v = 1"), {"m.py"}, {"m.py:A"}, {"m.py:A.__init__"}),
        (edit("size = 3", "size = 4"), {"m.py"}, {"m.py:A"}, set()),
        (edit("class A(Base)", "class A(Base, Other)"), {"m.py"}, {"m.py:A"}, set()),
        (edit("return 4", "return 5"), {"m.py"}, {"m.py:A"}, set()),
        (edit("LIMIT = 1", "LIMIT = 2"), {"m.py"}, set(), set()),
        (edit("import os", "import sys"), {"m.py"}, set(), set()),
        (BEFORE + "def new():\n    pass\n", {"m.py"}, set(), set()),
        (edit("    class B", "    def added(self):\n        pass\n    class B"), {"m.py"}, {"m.py:A"}, set()),
        (edit("    def g(self):\n        return 2\n", ""), {"m.py"}, {"m.py:A"}, {"m.py:A.g"}),
        (edit("def h(x)", "async def h(x)"), {"m.py"}, {"m.py:h"}, {"m.py:h"}),
        (edit("def h(x)", "def h2(x)"), {"m.py"}, {"m.py:h"}, {"m.py:h"}),
        (edit("LIMIT = 1", "LIMIT = 0x1  # same"), set(), set(), set()),
        (BEFORE.replace('"""Doc."""', '"""Other."""'), set(), set(), set()),
        (BEFORE.replace("\n", "\r\n"), set(), set(), set()),
        ("\ufeff" + BEFORE, set(), set(), set()),
        ("def broken(:\n", {"m.py"}, set(), set()),
    ],
)
def test_an_edit_names_the_places_that_exist_before_it(
    after: str, files: set[str], modules: set[str], functions: set[str]
) -> None:
    places = gold_places({"m.py": BEFORE}, {"m.py": after})

    assert (places.files, places.modules, places.functions) == (files, modules, functions)


def test_created_files_and_other_kinds_are_not_gold_but_deleted_files_are() -> None:
    places = gold_places({"a.py": "x = 1\n", "t.txt": "a"}, {"b.py": "x = 1\n", "t.txt": "b"})

    assert places.files == {"a.py"}
    assert not places.modules
    assert not places.functions


def test_a_definition_under_match_and_try_is_found() -> None:
    before = (
        "match x:\n    case 1:\n        def g():\n            return 1\n"
        "try:\n    pass\nexcept E:\n    def k():\n        return 1\n"
    )
    places = gold_places({"m.py": before}, {"m.py": before.replace("return 1", "return 2")})

    assert places.functions == {"m.py:g", "m.py:k"}
