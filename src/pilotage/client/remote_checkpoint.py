"""A checkpoint directory that only names a checkpoint which the service keeps."""

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pilotage.errors import ConfigError
from pilotage.wire.core import CheckpointRecord, Closed

FILE_NAME = "remote_checkpoint.json"


class _File(Closed):
    job_id: str
    checkpoint: CheckpointRecord
    is_published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """Which checkpoint of which job."""

    job_id: str
    record: CheckpointRecord
    is_published: bool = False
    """Whether the sampler had these weights; read where the service does not know it."""

    def write(self, directory: Path) -> None:
        """Make `directory`, whole or not at all.

        Raises:
            FileExistsError: it is there already.
        """
        content = _File(job_id=self.job_id, checkpoint=self.record, is_published=self.is_published)
        write_record(directory, FILE_NAME, content)

    @classmethod
    def read(cls, directory: Path) -> "RemoteCheckpoint":
        """Read what `write` wrote.

        Raises:
            ConfigError: the directory names no remote checkpoint.
        """
        content = read_record(directory, FILE_NAME, _File, saved_by="the training service")
        return cls(job_id=content.job_id, record=content.checkpoint, is_published=content.is_published)


def new_id(directory: Path) -> str:
    """Return a checkpoint id that reminds of the directory and that nobody has."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", directory.name)[:31]
    return f"{stem}-{uuid.uuid4().hex}"


def write_record(directory: Path, name: str, content: Closed) -> None:
    """Make `directory` with one JSON file in it, whole or not at all.

    Raises:
        FileExistsError: it is there already.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; a checkpoint is never replaced")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / name).open("w", encoding="utf-8") as file:
        json.dump(content.model_dump(mode="json"), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory)


def read_record[T: Closed](directory: Path, name: str, kind: type[T], *, saved_by: str) -> T:
    """Read what `write_record` wrote.

    Raises:
        ConfigError: the file is not there, or cannot be read.
    """
    try:
        return kind.model_validate_json((directory / name).read_bytes())
    except OSError:
        raise ConfigError(
            f"{directory} holds no {name}: it was not saved through {saved_by}; resume it with the backend"
            " that saved it"
        ) from None
    except ValidationError as error:
        raise ConfigError(f"{directory / name} cannot be read: {error.errors()[0]['msg']}") from None
