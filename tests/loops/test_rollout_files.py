"""A rollout file gives back what was written, bit for bit."""

import re
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.errors import RunDirectoryError
from pilotage.loops import read_rollout, write_rollout
from pilotage.types import (
    BranchCause,
    FinishReason,
    Outcome,
    Reward,
    Rollout,
    RolloutFailure,
    SamplingParams,
    Trajectory,
    Turn,
    token_ids,
)

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
LOGPROB = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
SECONDS = st.floats(0, 2e9)
WORDS = st.text(max_size=8)


@st.composite
def turns(draw: st.DrawFn, index: int) -> Turn:
    completion = draw(IDS)
    size = len(completion)
    return Turn(
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        branch_cause=draw(st.none() | st.sampled_from(BranchCause)),
        context_ids=token_ids(draw(IDS)),
        completion_ids=token_ids(completion),
        logprobs=np.array(draw(st.lists(LOGPROB, min_size=size, max_size=size)), np.float32),
        weights_versions=np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), np.int32),
        finish_reason=draw(st.sampled_from(FinishReason)),
        sampling=SamplingParams(
            temperature=draw(st.floats(0, 10)), seed=draw(st.none() | st.integers(0, 2**63 - 1))
        ),
        is_delivered=draw(st.booleans()),
        malformed_calls=draw(st.integers(0, 3)),
        called_tools=draw(st.none() | st.lists(WORDS, max_size=2).map(tuple)),
        started_at=draw(SECONDS),
        finished_at=draw(SECONDS),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    reward = st.builds(
        Reward,
        value=st.floats(allow_nan=False, allow_infinity=False),
        key=WORDS,
        source=WORDS,
        components=st.dictionaries(WORDS, st.floats(0, 1), max_size=2),
    )
    failure = st.builds(RolloutFailure, where=WORDS, message=WORDS, advice=WORDS, traceback=WORDS)
    return Rollout(
        id=draw(WORDS),
        group_id=draw(WORDS),
        task_id=draw(WORDS),
        attempt=draw(st.integers(0, 2)),
        outcome=draw(st.sampled_from(Outcome)),
        reward=draw(st.none() | reward),
        trajectory=Trajectory(turns=tuple(draw(turns(index)) for index in range(draw(st.integers(0, 4))))),
        failure=draw(st.none() | failure),
        timings_s=draw(st.dictionaries(WORDS, SECONDS, max_size=2)),
        counters=draw(st.dictionaries(WORDS, st.integers(0, 99), max_size=2)),
        facts=draw(st.dictionaries(WORDS, WORDS, max_size=2)),
    )


def assert_same_turn(one: Turn, other: Turn) -> None:
    for field in fields(Turn):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        else:
            assert left == right
            assert type(left) is type(right)


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    for field in fields(Rollout):
        if field.name != "trajectory":
            assert getattr(one, field.name) == getattr(other, field.name)
    assert len(one.trajectory.turns) == len(other.trajectory.turns)
    for left, right in zip(one.trajectory.turns, other.trajectory.turns, strict=True):
        assert_same_turn(left, right)


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_what_was_written_comes_back_bit_for_bit(rollout: Rollout) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "r.json.gz"
        write_rollout(path, rollout)
        assert_same_rollout(rollout, read_rollout(path))


def one_turn(logprobs: list[float]) -> Rollout:
    size = len(logprobs)
    turn = Turn(
        parent=None,
        context_ids=token_ids([1]),
        completion_ids=token_ids(range(size)),
        logprobs=np.array(logprobs, np.float32),
        weights_versions=np.zeros(size, np.int32),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        started_at=0.0,
        finished_at=1.0,
    )
    return Rollout(
        id="r",
        group_id="g",
        task_id="t",
        attempt=0,
        outcome=Outcome.COMPLETED,
        reward=None,
        trajectory=Trajectory(turns=(turn,)),
    )


def test_log_probs_keep_every_bit_of_their_32(tmp_path: Path) -> None:
    # The smallest subnormal, the float next to -1, -0 and a value that has no short decimal form.
    values = [-(2.0**-149), float(np.nextafter(np.float32(-1), np.float32(0))), -0.0, float(np.float32(-0.1))]
    write_rollout(tmp_path / "r.json.gz", one_turn(values))
    (turn,) = read_rollout(tmp_path / "r.json.gz").trajectory.turns
    assert turn.logprobs.tobytes() == np.array(values, np.float32).tobytes()


def test_a_reward_of_zero_is_no_missing_reward(tmp_path: Path) -> None:
    scored = one_turn([-0.5])
    zero = Rollout(
        **{field.name: getattr(scored, field.name) for field in fields(Rollout) if field.name != "reward"},
        reward=Reward(value=0.0, key="reward", source="reward.json"),
    )
    write_rollout(tmp_path / "zero.json.gz", zero)
    write_rollout(tmp_path / "none.json.gz", scored)
    assert read_rollout(tmp_path / "zero.json.gz").reward == zero.reward
    assert read_rollout(tmp_path / "none.json.gz").reward is None


def test_only_whole_files_are_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_rollout(tmp_path / "missing" / "r.json.gz", one_turn([-0.5]))
    write_rollout(tmp_path / "r.json.gz", one_turn([-0.5]))
    assert [path.name for path in tmp_path.iterdir()] == ["r.json.gz"]


@given(rollouts(), st.data())
@settings(max_examples=40)
def test_a_file_with_any_damage_is_the_rollout_or_one_clear_line(
    rollout: Rollout, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "r.json.gz"
        write_rollout(path, rollout)
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        else:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        said = what_a_reader_says(path)
        # A header's field may say nothing of the content: then the rollout is there all the same.
        assert said == rollout.id or re.fullmatch(
            f"{re.escape(str(path))} is no readable rollout: .*; restore or remove it", said, re.DOTALL
        )


def what_a_reader_says(path: Path) -> str:
    try:
        return read_rollout(path).id
    except RunDirectoryError as error:
        return str(error)
