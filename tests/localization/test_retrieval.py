"""Search without a model, on trees small enough to rank by hand."""

import math

import pytest

from pilotage.localization import BASELINES, Bm25, Function, functions_of, gold_of_changes, locate
from pilotage.localization.retrieval import words_of

TREE = {
    "pkg/parse.py": "class Parser:\n    def next_token(self):\n        return self.lexer.advance()\n\n"
    "def parse_query(text):\n    return Parser(text)\n",
    "pkg/render.py": "def render(tree):\n    return str(tree)\n",
    "pkg/broken.py": "def broken(:\n",
    "tests/test_parse.py": "def test_lexer_advance():\n    pass\n",
    "docs/conf.py": "def advance():\n    pass\n",
    "README.md": "lexer advance",
}


def named(functions: list[Function]) -> list[str]:
    return [f"{f.path}:{f.class_name}.{f.name}" for f in functions]


def test_a_tree_has_functions_and_methods_but_no_tests_or_documents() -> None:
    assert named(functions_of(TREE)) == [
        "pkg/parse.py:Parser.next_token",
        "pkg/parse.py:.parse_query",
        "pkg/render.py:.render",
    ]


def test_words_are_identifiers_and_their_parts_without_stop_words() -> None:
    assert (
        words_of("The HTTPServer of parse_query2 x")
        == [
            "httpserver",
            "http",
            "server",
            "parse_query2",
            "parse",
            "query",
            "2",
        ][:-1]
    )


def test_bm25_scores_as_worked_out_by_hand() -> None:
    functions = [Function("a.py", "", "one", "zebra"), Function("b.py", "", "two", "apple apple")]
    index = Bm25(functions)
    # Documents: py one*3 zebra (5 words; "a" is a stop word), py two*3 apple*2 (6; "b" is too short).
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    norm = 1.5 * (0.25 + 0.75 * 6 / 5.5)
    assert index._score({"apple": 1}, 1) == pytest.approx(rarity * 2 * 2.5 / (2 + norm))
    assert index._score({"apple": 1}, 0) == 0.0


def test_bm25_finds_the_function_that_the_issue_speaks_of_and_nothing_for_foreign_words() -> None:
    index = Bm25(functions_of(TREE))
    assert named(index.rank("the lexer does not advance", 1)) == ["pkg/parse.py:Parser.next_token"]
    assert index.rank("giraffe", 3) == []


def test_every_baseline_hands_in_functions_of_the_tree() -> None:
    functions = functions_of(TREE)
    index = Bm25(functions)
    for method in BASELINES:
        found = locate(method, functions, index, "render the tree with Parser", "seed")
        assert found
        assert set(found) <= set(functions)
        assert found == locate(method, functions, index, "render the tree with Parser", "seed")
    with pytest.raises(ValueError, match="method is one of random"):
        locate("magic", functions, index, "", "")


def test_a_named_identifier_comes_before_what_bm25_likes() -> None:
    functions = functions_of(TREE)
    issue = "lexer advance lexer advance in render"
    assert named(locate("bm25-1", functions, Bm25(functions), issue, "")) == [
        "pkg/parse.py:Parser.next_token"
    ]
    assert named(locate("identifiers", functions, Bm25(functions), issue, "")) == ["pkg/render.py:.render"]


def test_an_empty_tree_has_no_answer() -> None:
    assert [locate(method, [], Bm25([]), "issue", "") for method in BASELINES] == [[]] * len(BASELINES)


def test_the_places_of_a_row_are_its_files_and_what_it_edits() -> None:
    edits = {"edited_modules": ["a.py:C"], "edited_entities": None, "added_entities": ["a.py:C.new"]}
    places = gold_of_changes([{"file": "a.py", "changes": edits}, {"file": "b.py", "changes": {}}])
    assert (places.files, places.modules, places.functions) == ({"a.py", "b.py"}, {"a.py:C"}, set())
    with pytest.raises(ValueError, match=r"gold place 'b.py:C' is not in its file 'a.py'"):
        gold_of_changes([{"file": "a.py", "changes": {"edited_modules": ["b.py:C"]}}])
