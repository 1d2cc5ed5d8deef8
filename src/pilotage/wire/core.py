"""The strict core of the training service: paths, the capability document, errors, small bodies.

Under `{prefix}/{job}/core`:

    GET  ""                                  CoreState
    POST /lease                              LeaseBody -> LeaseState
    POST /forward_backward   frame           -> frame                          sequenced
    POST /step               JSON AdamParams -> JSON StepResult                sequenced
    POST /discard            {}              -> {}                             sequenced
    POST /publish            {}              -> PublishResult                  sequenced
    POST /save               SaveBody        -> CheckpointRecord               sequenced
    POST /load               LoadBody        -> CheckpointRecord               sequenced
    POST /sample             frame           -> frame (a completion)
    POST /forward            frame           -> frame (log-probs)
    GET  /operations/{id}                    the outcome of any of the above
    GET  /metrics?cursor=&series=            MetricPage; series is trainer (the default) or gpu

Every POST but `/lease` has the query `operation_id` (the caller's, 1 to 64 of A-Z a-z 0-9 _ -), and, where
sequenced, `sequence`: 1 for the job's first such call, then one more each. A call whose number is not next
waits for those before it. The same id with the same bytes gets the first outcome again, whether that was a
result or an error; with other bytes it is a conflict. `wait_s` (query, at most `max_wait_s`) holds the
reply until there is an outcome; after it the reply is 202 with an `OperationState`, and the outcome is
fetched from `/operations/{id}`, which takes `wait_s` too. The header `server-timing` says how long the engine
worked on a result, `work;dur=MS`, and for every reply how long the service had the request, `total;dur=MS`;
the rest of a call's time is the network's and the client's.

Frames are DSSST1 (`frames`), their trees those of `samples`. Bodies are closed: an unknown key is 422 with
its path.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL = "pilotage-core"
PROTOCOL_VERSION = 2
OCTET_STREAM = "application/octet-stream"
OPERATION_ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
SEQUENCED_VERBS = ("forward_backward", "step", "discard", "publish", "save", "load")
FREE_VERBS = ("sample", "forward")


class Closed(BaseModel):
    """A body without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorCode(StrEnum):
    """What went wrong; the HTTP status goes with it (`HTTP_STATUS`)."""

    INVALID = "invalid"
    """The body: `path` says where."""
    UNAUTHENTICATED = "unauthenticated"
    """No token, or an unknown one."""
    NOT_FOUND = "not_found"
    """No such job, checkpoint or operation, or it belongs to someone else."""
    CONFLICT = "conflict"
    """The state does not allow it: a job that ended, an id or a sequence number used for other bytes."""
    JOB_NOT_RUNNING = "job_not_running"
    """The job is not running yet, or not any more."""
    TOO_LARGE = "too_large"
    """The body, or the reply that it would need, is over the stated cap."""
    CAPACITY = "capacity"
    """More GPUs than there are in all."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """No room for one token after the prompt."""
    WEIGHTS_CHANGING = "weights_changing"
    """Weights are being published."""
    SAMPLER_ERROR = "sampler_error"
    """Sampling failed."""
    TRAINER_ERROR = "trainer_error"
    """A trainer verb failed; the message says what state it left."""
    ENGINE_LOST = "engine_lost"
    """The job's engine is gone, and its state with it; the job has failed."""
    UNAVAILABLE = "unavailable"
    """The service or the engine cannot be reached now."""


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID: 422,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.JOB_NOT_RUNNING: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.CAPACITY: 429,
    ErrorCode.CONTEXT_EXCEEDED: 400,
    ErrorCode.WEIGHTS_CHANGING: 503,
    ErrorCode.SAMPLER_ERROR: 400,
    ErrorCode.TRAINER_ERROR: 400,
    ErrorCode.ENGINE_LOST: 410,
    ErrorCode.UNAVAILABLE: 503,
}


class ErrorBody(Closed):
    """Every error reply of the service, strict core or not."""

    code: str
    """An `ErrorCode`, or one of the stock wire's codes for chunk groups."""
    message: str
    retryable: bool = False
    """Whether the same call, repeated as it is, may succeed."""
    retry_after_s: float | None = None
    path: str | None = None
    """Where in the body, as a.b.0.c."""
    sub_job_id: str | None = None
    log_tail: tuple[str, ...] = ()
    """The engine's last log lines, where they say more."""


class Capabilities(Closed):
    """`GET {prefix}/capabilities`; a server without the strict core answers 404."""

    protocol: Literal["pilotage-core"] = "pilotage-core"
    version: int = PROTOCOL_VERSION
    max_request_bytes: int
    """Of one POST."""
    max_response_bytes: int
    max_wait_s: float
    """Of one long poll."""
    min_lease_s: float
    losses: tuple[str, ...]
    reductions: tuple[str, ...]


class LeaseBody(Closed):
    """Renews the job's lease."""

    lease_s: float = Field(gt=0, le=86_400)


class LeaseState(Closed):
    """When the job counts as abandoned."""

    expires_in_s: float
    status: str
    """The job's."""


class CoreState(Closed):
    """Where a job's engine stands."""

    next_sequence: int
    weights_version: int
    max_context_tokens: int


class OperationState(Closed):
    """An operation without an outcome yet."""

    operation_id: str
    status: Literal["waiting", "running"]


class PublishResult(Closed):
    """Outcome of publish."""

    weights_version: int


class SaveBody(Closed):
    """Names a checkpoint; an existing one is never replaced."""

    checkpoint_id: str = Field(pattern=OPERATION_ID_PATTERN)
    weights_only: bool = False


class LoadBody(Closed):
    """Restores a checkpoint of this job, or of another one of the same owner."""

    checkpoint_id: str = Field(pattern=OPERATION_ID_PATTERN)
    source_job_id: str | None = None
    weights_only: bool = False
    """Start a fresh optimizer, also where the checkpoint has one."""


class CheckpointRecord(Closed):
    """A checkpoint that is complete on the service's disk."""

    checkpoint_id: str
    checkpoint_type: Literal["resumable", "weights-only"]
    global_steps: int
    """Optimizer steps behind these weights."""
    weights_version: int
    created_at: str
    size_bytes: int
    sha256: str
    """Over the files' names, sizes and digests, in order of name."""


def rfc3339(at: float) -> str:
    """Return Unix seconds as the wire writes times."""
    return datetime.fromtimestamp(at, UTC).isoformat()


def checkpoint_digest(files: Mapping[str, tuple[int, str]]) -> str:
    """Return a checkpoint's digest, as in `CheckpointRecord.sha256`.

    Args:
        files: size in bytes and SHA-256 in hex, by name.
    """
    whole = sha256()
    for name, (size, digest) in sorted(files.items()):
        whole.update(f"{name}\0{size}\0{digest}\n".encode())
    return whole.hexdigest()


METRIC_SERIES = {"trainer": "metrics.jsonl", "gpu": "gpu.jsonl"}
"""Metric series of a job, and their files in its directory."""


class MetricRecord(Closed):
    """One finished operation of the trainer, or one look at a GPU.

    A figure that is not finite is the string NaN or Infinity.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    cursor: int
    at: float
    """Unix seconds."""
    verb: str
    """The operation's, or gpu/UUID."""
    duration_s: float
    """What the operation took, or the time between two looks."""
    values: dict[str, float]


class MetricPage(Closed):
    """Records from a cursor on."""

    records: tuple[MetricRecord, ...]
    next_cursor: int
