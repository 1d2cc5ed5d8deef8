"""What a finding is, and that every one of them has a broken set-up among these tests."""

from pathlib import Path

import pytest

from pilotage.errors import ConfigError
from pilotage.ops.doctor.findings import Finding, FindingName, Severity, from_error, in_order, ok


def test_every_finding_has_a_broken_set_up() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(FindingName) >= 24
    assert [name for name in FindingName if f"FindingName.{name.name}" not in tests] == []


@pytest.mark.parametrize(
    ("severity", "fix"),
    [(Severity.OK, "do it"), (Severity.SKIPPED, "do it"), (Severity.WARNING, ""), (Severity.ERROR, "")],
)
def test_a_fix_belongs_to_warnings_and_errors(severity: Severity, fix: str) -> None:
    with pytest.raises(ValueError, match="a fix belongs to"):
        Finding(name=FindingName.DISK, severity=severity, evidence="x", fix=fix)


@pytest.mark.parametrize(
    ("message", "evidence", "fix"),
    [
        ("x is wrong; use y", "x is wrong", "use y"),
        ("the sandbox needs bwrap: install it, or set z", "the sandbox needs bwrap", "install it, or set z"),
        ("a: b: c is broken", "a: b: c is broken", "otherwise"),
        ("one of use-computer: user", "one of use-computer: user", "otherwise"),
    ],
)
def test_an_error_of_ours_is_cut_where_it_says_what_to_do(message: str, evidence: str, fix: str) -> None:
    found = from_error(FindingName.TASKS, ConfigError(message), fix="otherwise")
    assert (found.severity, found.evidence, found.fix) == (Severity.ERROR, evidence, fix)


def test_findings_are_in_the_order_of_their_names() -> None:
    names = [FindingName.NO_OP, FindingName.PYTHON, FindingName.LOGIN]
    assert [f.name for f in in_order([ok(name, "well") for name in names])] == [
        FindingName.PYTHON,
        FindingName.LOGIN,
        FindingName.NO_OP,
    ]
