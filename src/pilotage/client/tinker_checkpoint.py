"""A checkpoint directory that only names a checkpoint which a Tinker server keeps."""

from pathlib import Path

from pilotage.client.remote_checkpoint import read_record, write_record
from pilotage.wire.core import Closed

FILE_NAME = "tinker_checkpoint.json"


class TinkerCheckpoint(Closed):
    """Which checkpoint of which server, and what the driver knows of its weights."""

    base_url: str
    path: str
    """As the server names it: tinker://RUN/weights/NAME."""
    weights_version: int
    is_published: bool
    """Whether the sampler had these weights."""
    weights_only: bool
    """Whether a load starts a fresh optimizer."""

    def write(self, directory: Path) -> None:
        """Make `directory`, whole or not at all.

        Raises:
            FileExistsError: it is there already.
        """
        write_record(directory, FILE_NAME, self)

    @classmethod
    def read(cls, directory: Path) -> "TinkerCheckpoint":
        """Read what `write` wrote.

        Raises:
            ConfigError: the directory names no checkpoint of a Tinker server.
        """
        return read_record(directory, FILE_NAME, cls, saved_by="a Tinker server")
