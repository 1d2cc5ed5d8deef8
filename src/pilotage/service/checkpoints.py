"""A job's checkpoints on disk: `checkpoints/ID/` holds the engine's files, `checkpoints/ID.json` the record.

Invariant: a checkpoint exists exactly if its record does; the record is written last and removed first. So
the disk alone says what there is, whatever was killed when.
"""

import re
import shutil
import time
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path

from pydantic import ValidationError

from pilotage.files import write_atomically
from pilotage.service.refusals import Refusal
from pilotage.wire.core import OPERATION_ID_PATTERN, CheckpointRecord, ErrorCode, checkpoint_digest, rfc3339

_ID = re.compile(OPERATION_ID_PATTERN)


class Checkpoints:
    """The checkpoints of one job."""

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: need not exist.
        """
        self._directory = directory

    def path_of(self, checkpoint_id: str) -> Path:
        """Return where a checkpoint's files are, or will be.

        Raises:
            Refusal: the id is none.
        """
        if not _ID.fullmatch(checkpoint_id):
            raise Refusal(
                ErrorCode.INVALID, "a checkpoint id is 1 to 64 of A-Z a-z 0-9 _ -", path="checkpoint_id"
            )
        return self._directory / checkpoint_id

    def get(self, checkpoint_id: str) -> CheckpointRecord:
        """Return the record of a checkpoint.

        Raises:
            Refusal: there is none.
        """
        path = self._record_path(checkpoint_id)
        try:
            return CheckpointRecord.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            raise Refusal(ErrorCode.NOT_FOUND, f"no checkpoint {checkpoint_id}; list them first") from None

    def records(self) -> list[CheckpointRecord]:
        """Return all records, oldest first."""
        found = [self.get(path.stem) for path in self._directory.glob("*.json")]
        return sorted(found, key=lambda record: (record.created_at, record.checkpoint_id))

    def add(
        self, checkpoint_id: str, *, is_weights_only: bool, global_steps: int, weights_version: int
    ) -> CheckpointRecord:
        """Record the files that are at `path_of(checkpoint_id)`."""
        directory = self.path_of(checkpoint_id)
        size, digest = _measure(directory)
        record = CheckpointRecord(
            checkpoint_id=checkpoint_id,
            checkpoint_type="weights-only" if is_weights_only else "resumable",
            global_steps=global_steps,
            weights_version=weights_version,
            created_at=rfc3339(time.time()),
            size_bytes=size,
            sha256=digest,
        )
        write_atomically(self._record_path(checkpoint_id), record.model_dump_json().encode() + b"\n")
        return record

    def files(self, checkpoint_id: str) -> dict[str, int]:
        """Return name and size in bytes of a checkpoint's files; one in a directory is named with it."""
        self.get(checkpoint_id)
        return {name: path.stat().st_size for name, path in _files(self.path_of(checkpoint_id))}

    def file(self, checkpoint_id: str, name: str) -> Path:
        """Return the path of one file.

        Raises:
            Refusal: no such checkpoint or file.
        """
        if name not in self.files(checkpoint_id):
            raise Refusal(ErrorCode.NOT_FOUND, f"checkpoint {checkpoint_id} has no file of that name")
        return self.path_of(checkpoint_id) / name

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint.

        Raises:
            Refusal: there is none.
        """
        self.get(checkpoint_id)
        self._record_path(checkpoint_id).unlink()
        shutil.rmtree(self.path_of(checkpoint_id), ignore_errors=True)

    def discard_incomplete(self, checkpoint_id: str) -> None:
        """Remove files that a killed save left without a record."""
        directory = self.path_of(checkpoint_id)
        if directory.exists() and not self._record_path(checkpoint_id).exists():
            shutil.rmtree(directory)

    def _record_path(self, checkpoint_id: str) -> Path:
        directory = self.path_of(checkpoint_id)
        return directory.with_name(f"{directory.name}.json")


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files below a directory, by name."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path


def _measure(directory: Path) -> tuple[int, str]:
    """Return size in bytes and digest of all files."""
    files: dict[str, tuple[int, str]] = {}
    for name, path in _files(directory):
        with path.open("rb") as file:
            files[name] = path.stat().st_size, file_digest(file, "sha256").hexdigest()
    return sum(size for size, _ in files.values()), checkpoint_digest(files)
