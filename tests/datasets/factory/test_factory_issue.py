"""Issue text: what is told, what is hidden, what is flagged."""

import re

from tests.datasets.factory.toy import FILES

from pilotage.datasets.factory.issue import Symptom, hidden_names, issue_text, leaks, symptoms
from pilotage.datasets.factory.suites import Failure
from pilotage.localization import Places

GOLD = Places(
    files=frozenset({"src/toybox/words.py"}),
    modules=frozenset({"src/toybox/words.py:shorten"}),
    functions=frozenset({"src/toybox/words.py:shorten"}),
)
TESTS = "tests/test_toybox.py"


def failure(message: str = "assert 1 == 2", line: int = 0, **parameters: str) -> Failure:
    return Failure(error="AssertionError", message=message, line=line, parameters=parameters)


def told(name: str, failed: Failure, *, files: dict[str, bytes] | None = None) -> list[Symptom]:
    hidden: list[re.Pattern[str]] = hidden_names(GOLD)
    return symptoms({f"{TESTS}::{name}": failed}, FILES if files is None else files, hidden)


def snippet(body: str, failed: Failure) -> str | None:
    found = told("test_a", failed, files={TESTS: f"def test_a(x):\n{body}".encode()})
    return found[0].snippet if found else None


def test_the_text_is_the_body_of_the_test_and_how_it_failed() -> None:
    (symptom,) = told("TestWords::test_shorten", failure("assert 'abcdef...' == 'abcde...'", line=34))
    assert issue_text([symptom]) == (
        "# assert 'abcdef...' == 'abcde...'\n\nThis does not work as it should:\n\n```python\n"
        'assert shorten("abcdefgh", 8) == "abcdefgh"\n'
        'assert shorten("abcdefghi", 8) == "abcde..."  # fails here\n'
        "```\n\nIt ends with\n\n```\nassert 'abcdef...' == 'abcde...'\n```\n"
    )


def test_what_comes_after_the_failure_is_not_told() -> None:
    assert snippet("    a = 1\n    b = 2\n    c = 3\n", failure(line=3)) == "a = 1\nb = 2  # fails here"


def test_a_statement_of_several_lines_is_told_whole_and_marked_at_its_end() -> None:
    body = '    a = 1\n    f("""\n    x\n    """)\n    c = 3\n'
    assert snippet(body, failure(line=3)) == 'a = 1\nf("""\nx\n""")  # fails here'


def test_parameters_are_told_and_the_docstring_is_not() -> None:
    (symptom,) = told("TestWords::test_join[abc-x]", failure(words="'abc'", text="'a, b and c'"))
    assert symptom.snippet == "text = 'a, b and c'\nwords = 'abc'\nassert join(words) == text"


def test_a_parameter_without_a_literal_is_left_out() -> None:
    assert (
        snippet("    f(x)\n", failure(x="<object object at 0x7f00aabbccdd>", y="[<A at 0x7f00>]")) == "f(x)"
    )


def test_a_test_without_a_body_of_its_own_or_with_a_long_one_cannot_be_told() -> None:
    assert told("test_made_at_import", failure()) == []
    assert snippet("    f(x)\n" * 41, failure()) is None
    assert told("test_a", failure(), files={TESTS: b"def test_a(): f()\n"}) == []
    assert told("test_a", failure(), files={TESTS: b"def test_a(:\n"}) == []


def test_no_text_names_a_gold_file_or_a_test() -> None:
    for body in (
        "    import toybox.words\n",
        "    from toybox.words import x\n",
        "    open('words.py')\n",
        "    open('toybox/words')\n",
        "    test_a(x)\n",
    ):
        assert snippet(body, failure()) is None, body
    assert snippet("    f(x)\n", failure("error in src/toybox/words.py")) is None
    assert snippet("    words = f(x)\n", failure()) == "words = f(x)"  # a word like any other; flagged


def test_a_package_itself_is_no_file_to_hide() -> None:
    gold = Places(files=frozenset({"a/__init__.py"}), modules=frozenset(), functions=frozenset())
    assert hidden_names(gold) == []


def test_addresses_and_directories_of_a_machine_are_not_told() -> None:
    message = "<A at 0x7f00aabbccdd> in /tmp/tree/toybox/x.txt and /tmp/t/test_a0/y.txt and /tmp/tmpdir/z\n"
    (symptom,) = told("test_what_is_left", failure(message))
    assert symptom.message == ("<A at 0x...> in toybox/x.txt and y.txt and z",)


def test_a_long_message_is_cut_and_an_empty_one_is_said() -> None:
    (symptom,) = told("test_what_is_left", failure("\n".join(["x" * 500] * 20)))
    assert symptom.message == ("x" * 240,) * 12 + ("...",)
    (symptom,) = told("test_what_is_left", failure(" "))
    assert symptom.message == ("It fails without a message.",)


def test_the_shortest_text_comes_first() -> None:
    failures = {f"{TESTS}::{name}": failure() for name in ("test_a_counter_goes_up", "test_what_is_left")}
    found = symptoms(failures, FILES, [])
    assert [symptom.test for symptom in found] == [
        f"{TESTS}::test_what_is_left",
        f"{TESTS}::test_a_counter_goes_up",
    ]


def test_several_symptoms_are_told_one_by_one() -> None:
    one, two = (told(name, failure())[0] for name in ("test_what_is_left", "test_a_counter_goes_up"))
    text = issue_text([one, two])
    assert text.index("## 1") < text.index(one.snippet) < text.index("## 2") < text.index(two.snippet)


def test_leaks_are_words_of_the_gold_places() -> None:
    assert leaks("shorten(x)", GOLD).function
    assert not leaks("shortened(x)", GOLD).function
    assert leaks("words = 1", GOLD).file
    method = Places(
        files=frozenset({"a.py"}), modules=frozenset({"a.py:Bag"}), functions=frozenset({"a.py:Bag.add"})
    )
    found = leaks("bag.add(1)", method)
    assert (found.function, found.module, found.file) == (True, False, False)
    assert leaks("Bag()", method).module
