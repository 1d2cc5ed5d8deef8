"""The score of a hand-in, with sums worked out by hand, and the verifier as a program."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pilotage.localization import Places, places_of, score_locations, scoring

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
