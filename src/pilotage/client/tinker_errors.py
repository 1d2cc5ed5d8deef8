"""From what the Tinker SDK raises to our errors."""

import contextlib
from collections.abc import Callable, Generator

import tinker
from tinker.types import RequestErrorCategory

from pilotage.client.secret import Secret
from pilotage.errors import (
    AuthError,
    CapacityError,
    NotFoundError,
    PilotageError,
    RequestFailedError,
    SamplerError,
    ServiceError,
    TrainerError,
)

_CLASSES: tuple[tuple[type[tinker.APIStatusError], type[ServiceError]], ...] = (
    (tinker.AuthenticationError, AuthError),
    (tinker.PermissionDeniedError, AuthError),
    (tinker.NotFoundError, NotFoundError),
    (tinker.BillingError, CapacityError),
    (tinker.RateLimitError, CapacityError),
)


@contextlib.contextmanager
def attributed(what: str, key: Secret, wrap: Callable[[Exception, str], PilotageError]) -> Generator[None]:
    """Turn whatever the SDK raises into one of our errors.

    Args:
        what: was asked of the server, for the message.
        wrap: makes the error from the SDK's and the message.
    """
    try:
        yield
    except PilotageError:
        raise
    except Exception as error:  # the SDK raises its own errors, ValueError and RuntimeError
        text = " ".join(key.redact(str(error)).split()) or type(error).__name__
        raise wrap(error, f"{what}: {text}") from error


def service_error(error: Exception, message: str) -> ServiceError:
    """Return the error of a call that is neither sampling nor training."""
    status = _status_error(error)
    found = next((ours for theirs, ours in _CLASSES if isinstance(status, theirs)), RequestFailedError)
    wrapped = found(message)
    wrapped.status = None if status is None else status.status_code
    return wrapped


def trainer_error(error: Exception, message: str) -> TrainerError:
    """Return the error of a trainer's call."""
    return TrainerError(message)


def sampler_error(error: Exception, message: str) -> SamplerError:
    """Return the error of a sampler's call: what the server blames on the request is not sent again."""
    wrapped = SamplerError(message)
    status = _status_error(error)
    wrapped.retryable = not (
        (isinstance(error, tinker.RequestFailedError) and error.category is RequestErrorCategory.User)
        or (
            status is not None
            and 400 <= status.status_code < 500
            and status.status_code not in (408, 409, 429)
        )
    )
    return wrapped


def _status_error(error: BaseException | None) -> tinker.APIStatusError | None:
    """Return the HTTP error that an error is, or comes from."""
    while error is not None and not isinstance(error, tinker.APIStatusError):
        error = error.__cause__
    return error
