"""Every error that Pilotage raises on purpose, on one screen.

    PilotageError
    |-- ConfigError            the caller is wrong: a key, a value, a path (exit code 2)
    |   |-- TaskError          a directory that is not a usable Harbor task
    |   |-- PackageError       a package of which no bugs can be made
    |   |-- TemplateError      a chat template or tokenizer that cannot be extended turn by turn
    |   `-- RunDirectoryError  a run directory that belongs to another config, or is in use
    |-- RewardError            a verifier's output holds no usable reward
    |-- SamplerError           the sampler failed; retryable unless it says otherwise
    |   |-- ContextExceededError  the prompt does not fit the context window; never retryable
    |   `-- WeightsChangingError  weights are being published; retry after `retry_after_s`
    |-- TrainerError           the trainer failed; a failed step stops the run
    |-- WireError              bytes that are not a frame, or a tree that a frame cannot hold
    |   `-- InvalidBodyError   a frame or JSON body whose contents are wrong; it says where
    `-- ServiceError           the training service refused or failed a call
        |-- AuthError          no token, or one that it does not know (exit code 3)
        |-- NotFoundError      no such job or checkpoint, or somebody else's (4)
        |-- CapacityError      no GPUs for it (5)
        |-- JobFailedError     the job ended before its work was done (6)
        |-- RequestFailedError the call failed (7)
        |   `-- LostReplyError nobody can say whether the call was carried out
        |-- WaitTimeoutError   it did not happen in time (8)
        `-- ConflictError      the state of a job does not allow it (9)

To add one: subclass the nearest class, keep it picklable (arguments are the message), and write a
message that states what was wrong, where, and what to do. A failed rollout is data, not an
exception: it ends in an `Outcome`.
"""


class PilotageError(Exception):
    """Base of all deliberate errors."""

    exit_code = 1
    """Of a command that ends with it."""


class ConfigError(PilotageError, ValueError):
    """The caller is wrong; nothing was started."""

    exit_code = 2


class TaskError(ConfigError):
    """A directory is not a usable Harbor task."""


class PackageError(ConfigError):
    """No bugs can be made of a package: no sdist, no tests, or a suite that fails; others may go on."""


class TemplateError(ConfigError):
    """A chat template or tokenizer cannot be used token-exactly."""


class RunDirectoryError(ConfigError):
    """A run directory belongs to another config, or another process holds it."""


class RewardError(PilotageError):
    """A verifier's output holds no usable reward; the rollout's reward is None, never 0."""


class SamplerError(PilotageError):
    """The sampler failed."""

    retryable = True


class ContextExceededError(SamplerError):
    """The prompt leaves no room in the context window."""

    retryable = False


class WeightsChangingError(SamplerError):
    """Weights are being published; the call may be repeated after `retry_after_s`."""

    retry_after_s = 1.0


class TrainerError(PilotageError):
    """The trainer failed."""


class ServiceError(PilotageError):
    """The training service refused or failed a call."""

    code: str | None = None
    """The service's own, where it gave one (`wire.core.ErrorCode`)."""
    status: int | None = None
    """HTTP status, where there was a reply."""
    retry_after_s: float | None = None
    log_tail: tuple[str, ...] = ()
    """Last log lines of the job's engine."""


class AuthError(ServiceError):
    """The service does not know the token, or there is none."""

    exit_code = 3


class NotFoundError(ServiceError):
    """No such job, checkpoint or operation, or it belongs to somebody else."""

    exit_code = 4


class CapacityError(ServiceError):
    """There are no GPUs for it."""

    exit_code = 5


class JobFailedError(ServiceError):
    """The job ended, or its engine is gone."""

    exit_code = 6


class RequestFailedError(ServiceError):
    """The call failed."""

    exit_code = 7


class LostReplyError(RequestFailedError):
    """The call got no reply: nobody can say whether it was carried out."""


class WaitTimeoutError(ServiceError):
    """What was waited for did not happen in time."""

    exit_code = 8


class ConflictError(ServiceError):
    """The state of a job does not allow the call."""

    exit_code = 9


class WireError(PilotageError, ValueError):
    """Bytes that are not a frame, or a tree that a frame cannot hold."""


class InvalidBodyError(WireError):
    """A body whose contents are wrong; nothing was computed."""

    def __init__(self, path: str, message: str) -> None:
        """Args:
        path: where in the body, as a.b.0.c; empty is the whole body.
        """
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message
