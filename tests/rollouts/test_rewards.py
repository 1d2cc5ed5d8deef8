"""A verifier's files, one strict reading each; ids in brackets are those of the case collection."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.errors import RewardError
from pilotage.rollouts.rewards import MAX_BYTES, read_reward


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("0.5\n", 0.5), (" -1e-3 ", -0.001), ("+2.", 2.0), (".5", 0.5), ("3\r\n", 3.0)],
)
def test_a_plain_number_in_a_text_file_is_the_reward(tmp_path: Path, text: str, value: float) -> None:
    (tmp_path / "reward.txt").write_text(text)

    reward = read_reward(tmp_path)

    assert (reward.value, reward.key, reward.source) == (value, "reward", "verifier/reward.txt")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nan", "not one plain number"),  # R2: max(0, min(1, nan)) would be full marks
        ("inf", "not one plain number"),
        ("1e309", "not finite"),  # R10
        ("1_0", "not one plain number"),  # R11: Python's float says 10
        ("\uff11", "not one plain number"),
        ("\u0661", "not one plain number"),
        ("\ufeff1", "byte order mark"),
        ("1,0", "not one plain number"),
        ("1/2", "not one plain number"),
        ("True", "not one plain number"),
        ("1.0 # ok", "not one plain number"),
        ("1 2", "not one plain number"),
        ("0x1p3", "not one plain number"),
        ("   \n", "is empty"),
        ("", "is empty"),
    ],
)
def test_any_other_text_is_no_reward_and_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "reward.txt").write_text(text)

    with pytest.raises(RewardError, match=complaint):
        read_reward(tmp_path)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("{}", "empty object"),  # R8, R24
        ("", "is empty"),
        ("[1]", "must hold an object"),
        ("1", "must hold an object"),
        ('{"reward": NaN}', "holds NaN"),  # R10
        ('{"reward": -Infinity}', "holds -Infinity"),
        ('{"reward": 1e309}', "not finite"),
        ('{"reward": "1"}', "'reward' holds '1' .str., not a number"),
        ('{"reward": true}', "'reward' holds 'True' .bool., not a number"),
        ('{"reward": null}', "'reward' holds 'None' .NoneType., not a number"),  # R23
        ('{"reward": {"tests": 1}}', "'reward' holds .* .dict., not a number"),  # R6: which key
        ('{"reward": 1, "detail": [1]}', "'detail' holds .* .list., not a number"),
        ('{"accuracy": 0.2, "reward_raw": 1}', r"no key 'reward', but \['accuracy', 'reward_raw'\]"),  # R24
        ('{"tests": 1, "style": 0.2}', r"no key 'reward', but \['style', 'tests'\]"),  # R22
        ('{"reward": 0, "reward": 1}', "names a key twice"),
        ('{"reward": 1', "is not JSON"),
        ("[" * 5000, "is not JSON"),
        (f'{{"reward": 1{"0" * 400}}}', "not finite"),
    ],
)
def test_a_json_file_without_one_named_finite_number_is_no_reward(
    tmp_path: Path, body: str, complaint: str
) -> None:
    (tmp_path / "reward.json").write_text(body)

    with pytest.raises(RewardError, match=complaint):
        read_reward(tmp_path)


def test_the_named_key_is_the_reward_and_the_others_are_components(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"reward": 1, "duration": 37.2}')  # R4: not their mean

    assert read_reward(tmp_path).value == 1.0
    reward = read_reward(tmp_path, key="duration")

    assert (reward.value, reward.components) == (37.2, {"reward": 1.0})


def test_the_json_file_wins_and_a_text_file_that_differs_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reward.txt").write_text("1")  # R1
    (tmp_path / "reward.json").write_text('{"reward": 0}')

    with caplog.at_level(logging.WARNING):
        reward = read_reward(tmp_path)

    assert (reward.value, reward.source) == (0.0, "verifier/reward.json")
    assert "reward.json says 0.0 and wins; reward.txt says 1.0" in caplog.text


def test_no_file_is_no_reward(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="wrote neither"):  # R13, R16
        read_reward(tmp_path)


def test_a_verifier_class_of_harbors_needs_no_file(tmp_path: Path) -> None:
    assert read_reward(tmp_path, harbor_rewards={"reward": 0.25}).value == 0.25


def test_a_file_that_harbor_read_otherwise_is_no_reward(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"reward": 1}')

    with pytest.raises(RewardError, match="Harbor read 0"):
        read_reward(tmp_path, harbor_rewards={"reward": 0.0})


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "reward.json").open("wb") as file:
        file.truncate(2 * 2**30)  # sparse: nothing is written, but reading it would take 2 GiB

    with pytest.raises(RewardError, match=f"has 2147483648 bytes; a reward has at most {MAX_BYTES}"):
        read_reward(tmp_path)


def test_a_file_that_was_left_in_the_sandbox_as_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "reward.json.omitted").write_text("2147483648 bytes: too large to copy out\n")

    with pytest.raises(RewardError, match=r"reward.json is too large to read: 2147483648 bytes"):
        read_reward(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(RewardError, match="is it a link"):
        read_reward(tmp_path)


def test_bytes_that_are_no_text_are_no_reward(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_bytes(b"\xff1")

    with pytest.raises(RewardError, match="not UTF-8"):
        read_reward(tmp_path)


@given(st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_every_finite_number_survives_either_file(
    tmp_path_factory: pytest.TempPathFactory, value: float, is_json: bool
) -> None:
    directory = tmp_path_factory.mktemp("verifier")
    if is_json:
        (directory / "reward.json").write_text(json.dumps({"reward": value}))
    else:
        (directory / "reward.txt").write_text(repr(value))

    assert read_reward(directory).value == value  # 64 bits: 0.9995 stays 0.9995 (R16)
