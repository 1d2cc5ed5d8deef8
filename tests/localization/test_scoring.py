"""The score of a hand-in, with sums worked out by hand, and the verifier as a program."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.localization import Places, ceiling, locations_of, places_of, score_locations, scoring

GOLD = Places(files=frozenset({"a.py"}), modules=frozenset({"a.py:C"}), functions=frozenset({"a.py:C.m"}))
EXACT = {"file": "a.py", "class_name": "C", "function_name": "m"}


@pytest.mark.parametrize(
    ("locations", "total"),
    [
        ([EXACT], 3.0),
        ([EXACT] * 5, 3.0),
        (["a.py::C::m"], 3.0),
        (["a.py::C::"], 2.0),
        (["a.py::m"], 1.0),
        (["a.py"], 1.0),
        ([], 0.0),
        ([{"file": "a.py"}], 1.0),
        ([{"file": "a.py", "class_name": "C"}], 2.0),
        # F = 2*1/(2+1), M = 1, U = 1
        ([EXACT, {"file": "b.py"}], 2 / 3 + 2),
        ([EXACT, {"file": "a.py", "class_name": "C", "function_name": "n"}], 2 + 2 / 3),
        ([{"file": "./a.py", "class_name": "C", "function_name": "m"}], 3.0),
        ([{"file": "src\\..\\a.py ", "class_name": "C", "function_name": "m"}], 3.0),
        ([{"file": "a.py", "class_name": "C.Inner", "function_name": "m"}], 3.0),
        ([{"file": "a.py", "class_name": " ", "function_name": ""}], 1.0),
        ([{"file": "a.py", "function_name": "C.m"}], 3.0),
        ([{"file": "a.py", "class_name": "D", "function_name": "m"}], 1.0),
        # all 20 methods of C: U = 2*1/(20+1)
        ([EXACT | {"function_name": name} for name in ["m", *map(str, range(19))]], 2 + 2 / 21),
        # nine wrong places beside the right one: each level 2*1/(10+1)
        ([EXACT, *({"file": f"{i}.py", "class_name": "X", "function_name": "y"} for i in range(9))], 6 / 11),
    ],
)
def test_a_hand_in_scores_the_sum_of_three_f1(locations: list[Any], total: float) -> None:
    assert score_locations(places_of(locations), GOLD).total == pytest.approx(total)


TOP_LEVEL = Places(files=frozenset({"a.py"}), modules=frozenset({"a.py:g"}), functions=frozenset({"a.py:g"}))
NO_FUNCTION = Places(files=frozenset({"a.py"}), modules=frozenset({"a.py:C"}), functions=frozenset())
FILE_ONLY = Places(files=frozenset({"a.py"}), modules=frozenset(), functions=frozenset())
CLASS = {"file": "a.py", "class_name": "C"}


@pytest.mark.parametrize(
    ("gold", "locations", "zero", "match"),
    [
        (TOP_LEVEL, [{"file": "a.py", "function_name": "g"}], 3.0, 3.0),
        (NO_FUNCTION, [CLASS], 2.0, 3.0),
        (NO_FUNCTION, [EXACT], 2.0, 2.0),
        (NO_FUNCTION, [CLASS, EXACT], 2.0, 2.0),
        (NO_FUNCTION, [], 0.0, 0.0),
        (FILE_ONLY, [{"file": "a.py"}], 1.0, 3.0),
        (FILE_ONLY, [{"file": "b.py"}], 0.0, 2.0),
        (FILE_ONLY, [CLASS], 1.0, 2.0),
        (FILE_ONLY, [], 0.0, 0.0),
    ],
)
def test_a_level_without_gold_is_worth_what_the_task_says(
    gold: Places, locations: list[Any], zero: float, match: float
) -> None:
    answer = places_of(locations)
    assert score_locations(answer, gold).total == zero
    assert score_locations(answer, gold, empty="match").total == match


@pytest.mark.parametrize(
    ("gold", "most"), [(GOLD, 3.0), (TOP_LEVEL, 3.0), (NO_FUNCTION, 2.0), (FILE_ONLY, 1.0)]
)
def test_the_ceiling_is_what_the_gold_itself_scores(gold: Places, most: float) -> None:
    assert ceiling(gold) == most
    assert ceiling(gold, empty="match") == 3.0
    assert score_locations(places_of(locations_of(gold)), gold).total == most


names = st.sampled_from(["a", "b", "C", "D"])
records = st.fixed_dictionaries(
    {"file": names, "class_name": st.none() | names, "function_name": st.none() | names}
)


@given(st.lists(records, max_size=8))
def test_locations_name_the_places_that_they_came_from(given_records: list[dict[str, Any]]) -> None:
    places = places_of(given_records)
    assert places_of(locations_of(places)) == places


@given(st.lists(records, max_size=8), st.lists(records, min_size=1, max_size=8))
def test_no_answer_scores_more_than_the_gold(
    answer: list[dict[str, Any]], gold_records: list[dict[str, Any]]
) -> None:
    gold = places_of(gold_records)
    for empty in ("zero", "match"):
        total = score_locations(places_of(answer), gold, empty=empty).total
        assert 0 <= total <= ceiling(gold, empty=empty) <= 3


@pytest.mark.parametrize(
    "locations",
    [
        "a.py",
        [EXACT, {"file": ""}],
        [{"file": "/abs/a.py"}],
        [{"file": "../a.py"}],
        ["a.py::A::b::c"],
        [{"file": 3}],
        [EXACT] * 51,
    ],
)
def test_a_hand_in_that_breaks_a_rule_is_refused(locations: Any) -> None:
    with pytest.raises(scoring.InvalidAnswerError):
        places_of(locations)


@pytest.mark.parametrize(
    ("hand_in", "reward", "no_answer"),
    [
        (json.dumps({"locations": [EXACT]}), 3.0, 0),
        (json.dumps([EXACT]), 3.0, 0),
        ("{broken", 0.0, 1),
        (json.dumps({"locations": [{"file": ""}]}), 0.0, 1),
        (None, 0.0, 1),
    ],
)
def test_the_verifier_always_writes_a_reward(
    tmp_path: Path, hand_in: str | None, reward: float, no_answer: int
) -> None:
    gold, answer, out = tmp_path / "gold.json", tmp_path / "locations.json", tmp_path / "reward.json"
    gold.write_text(json.dumps({"files": ["a.py"], "modules": ["a.py:C"], "functions": ["a.py:C.m"]}))
    if hand_in is not None:
        answer.write_text(hand_in)

    subprocess.run(
        [sys.executable, "-I", scoring.__file__, str(gold), str(answer), str(out)], check=True, cwd=tmp_path
    )

    written = json.loads(out.read_text())
    assert written["reward"] == reward
    assert written["no_answer"] == no_answer


def test_the_verifier_starts_without_the_slow_parts_of_the_standard_library(tmp_path: Path) -> None:
    gold, out = tmp_path / "gold.json", tmp_path / "reward.json"
    gold.write_text(json.dumps({"files": ["a.py"], "modules": [], "functions": []}))
    program = [sys.executable, "-I", "-S", "-X", "importtime", scoring.__file__]

    done = subprocess.run(
        [*program, str(gold), str(tmp_path / "none.json"), str(out)],
        check=True,
        capture_output=True,
        text=True,
    )

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "json" in imported
    assert not {"dataclasses", "inspect", "pathlib", "typing"} & imported


def test_places_are_frozen_equal_by_their_fields_and_survive_pickling() -> None:
    same = Places(files=GOLD.files, modules=GOLD.modules, functions=GOLD.functions)

    assert {GOLD, same, pickle.loads(pickle.dumps(same))} == {GOLD}
    assert GOLD != FILE_ONLY
    with pytest.raises(AttributeError, match="frozen"):
        GOLD.files = frozenset()
