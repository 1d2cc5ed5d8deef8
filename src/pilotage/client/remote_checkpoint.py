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

    @staticmethod
    def new_id(directory: Path) -> str:
        """Return a checkpoint id that reminds of the directory and that nobody has."""
        stem = re.sub(r"[^A-Za-z0-9_-]", "-", directory.name)[:31]
        return f"{stem}-{uuid.uuid4().hex}"

    def write(self, directory: Path) -> None:
        """Make `directory`, whole or not at all.

        Raises:
            FileExistsError: it is there already.
        """
        if directory.exists():
            raise FileExistsError(f"{directory} exists already; a checkpoint is never replaced")
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        file_content = _File(job_id=self.job_id, checkpoint=self.record, is_published=self.is_published)
        content = file_content.model_dump(mode="json")
        with (partial / FILE_NAME).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(directory)

    @classmethod
    def read(cls, directory: Path) -> "RemoteCheckpoint":
        """Read what `write` wrote.

        Raises:
            ConfigError: the directory names no remote checkpoint.
        """
        try:
            content = _File.model_validate_json((directory / FILE_NAME).read_bytes())
        except OSError:
            raise ConfigError(
                f"{directory} holds no {FILE_NAME}: it was not saved through the training service; resume it"
                " with the backend that saved it"
            ) from None
        except ValidationError as error:
            raise ConfigError(f"{directory / FILE_NAME} cannot be read: {error.errors()[0]['msg']}") from None
        return cls(job_id=content.job_id, record=content.checkpoint, is_published=content.is_published)
