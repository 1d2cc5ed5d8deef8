"""The trackers by name, and what each needs installed."""

import importlib.util
from collections.abc import Iterable, Mapping
from enum import StrEnum

from pilotage.errors import ConfigError


class TrackerName(StrEnum):
    """What `logger` may list."""

    CONSOLE = "console"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"
    MLFLOW = "mlflow"


LIBRARIES: Mapping[TrackerName, tuple[str, ...]] = {
    TrackerName.CONSOLE: (),
    TrackerName.TENSORBOARD: ("tensorboard",),
    TrackerName.TRACKIO: ("trackio",),
    TrackerName.WANDB: ("wandb",),
    TrackerName.MLFLOW: ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules that a tracker imports; the extra that brings them has the tracker's name."""


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Check that what the trackers need is installed, without importing it.

    Raises:
        ConfigError: it is not; the message names the extra.
    """
    for name in names:
        for library in LIBRARIES[name]:
            if importlib.util.find_spec(library) is None:
                raise ConfigError(
                    f"logger has {name}, and {library} is not installed; `pip install 'pilotage[{name}]'`"
                )
