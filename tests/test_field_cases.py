"""Every known case of the field is a test that exists, or says why it cannot arise here."""

import ast
import re
import tomllib
from pathlib import Path
from typing import TypedDict

import pytest

TESTS = Path(__file__).parent
NUM_CASES = 134


class Case(TypedDict, total=False):
    case: str
    tests: list[str]
    absent: str


CASES: dict[str, Case] = tomllib.loads((TESTS / "field_cases.toml").read_text())  # an id twice is no TOML


def functions_of(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_no_case_is_left_out() -> None:
    assert len(CASES) == NUM_CASES
    assert all(re.fullmatch(r"[A-Z][1-9][0-9]?", name) for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_what_happens_and_has_its_tests_or_why_it_cannot_arise(name: str) -> None:
    case = CASES[name]
    assert case.keys() in ({"case", "tests"}, {"case", "absent"})
    assert len(case.get("case", "").split()) >= 5
    if "absent" in case:
        assert len(case["absent"].split()) >= 8
        return
    assert case.get("tests")
    for test in case.get("tests", []):
        path, _, function = test.partition("::")
        assert function.startswith("test_"), test
        assert function in functions_of(TESTS / path), f"{test} does not exist"
