"""Every error that Pilotage raises on purpose, on one screen.

    PilotageError
    |-- ConfigError            the caller is wrong: a key, a value, a path (exit code 2)
    |   |-- TaskError          a directory that is not a usable Harbor task
    |   |-- TemplateError      a chat template or tokenizer that cannot be extended turn by turn
    |   `-- RunDirectoryError  a run directory that belongs to another config, or is in use
    |-- RewardError            a verifier's output holds no usable reward
    |-- SamplerError           the sampler failed; retryable unless it says otherwise
    |   |-- ContextExceededError  the prompt does not fit the context window; never retryable
    |   `-- WeightsChangingError  weights are being published; retry after `retry_after_s`
    `-- TrainerError           the trainer failed; a failed step stops the run

To add one: subclass the nearest class, keep it picklable (arguments are the message), and write a
message that states what was wrong, where, and what to do. A failed rollout is data, not an
exception: it ends in an `Outcome`.
"""


class PilotageError(Exception):
    """Base of all deliberate errors."""


class ConfigError(PilotageError, ValueError):
    """The caller is wrong; nothing was started."""


class TaskError(ConfigError):
    """A directory is not a usable Harbor task."""


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
