"""One compressed file per rollout: its tree of turns with exact ids, its reward and how it ended."""

import gzip
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pilotage.errors import RunDirectoryError
from pilotage.files import write_atomically
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
)

_TURN_ARRAYS = {
    "context_ids": np.int32,
    "completion_ids": np.int32,
    "logprobs": np.float32,
    "weights_versions": np.int32,
}
_DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, AttributeError)
"""What reading raises where the bytes are not those that were written."""


def _turn_record(turn: Turn) -> dict[str, Any]:
    return {
        "parent": turn.parent,
        "branch_cause": turn.branch_cause,
        **{name: getattr(turn, name) for name in _TURN_ARRAYS},
        "finish_reason": turn.finish_reason,
        "sampling": asdict(turn.sampling),
        "is_delivered": turn.is_delivered,
        "malformed_calls": turn.malformed_calls,
        "called_tools": turn.called_tools,
        "started_at": turn.started_at,
        "finished_at": turn.finished_at,
    }


def _turn(record: dict[str, Any]) -> Turn:
    arrays = {name: np.array(record.pop(name), dtype) for name, dtype in _TURN_ARRAYS.items()}
    cause, called = record.pop("branch_cause"), record.pop("called_tools", None)
    return Turn(
        **arrays,
        branch_cause=BranchCause(cause) if cause else None,
        finish_reason=FinishReason(record.pop("finish_reason")),
        sampling=SamplingParams(**record.pop("sampling")),
        called_tools=None if called is None else tuple(called),
        **record,
    )


def write_rollout(path: Path, rollout: Rollout) -> None:
    """Write `rollout` to a new file; it is there whole or not at all."""
    record = {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "task_id": rollout.task_id,
        "attempt": rollout.attempt,
        "outcome": rollout.outcome,
        "reward": None if rollout.reward is None else asdict(rollout.reward),
        "discarded_tokens": dict(rollout.discarded_tokens),
        "failure": None if rollout.failure is None else asdict(rollout.failure),
        "timings_s": dict(rollout.timings_s),
        "counters": dict(rollout.counters),
        "facts": dict(rollout.facts),
        "turns": [_turn_record(turn) for turn in rollout.trajectory.turns],
    }
    raw = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    write_atomically(path, gzip.compress(raw, compresslevel=1))


def read_rollout(path: Path) -> Rollout:
    """Read what `write_rollout` wrote; every id and log-prob comes back bit for bit.

    Raises:
        RunDirectoryError: the file is torn, damaged, or of another format.
    """
    try:
        return _rollout(orjson.loads(gzip.decompress(path.read_bytes())))
    except _DAMAGE as error:
        what = f"{type(error).__name__}: {error}"
        raise RunDirectoryError(f"{path} is no readable rollout: {what}; restore or remove it") from error


def _rollout(record: dict[str, Any]) -> Rollout:
    reward, failure = record.pop("reward"), record.pop("failure")
    return Rollout(
        trajectory=Trajectory(turns=tuple(_turn(turn) for turn in record.pop("turns"))),
        outcome=Outcome(record.pop("outcome")),
        reward=Reward(**reward) if reward else None,
        failure=RolloutFailure(**failure) if failure else None,
        **record,
    )
