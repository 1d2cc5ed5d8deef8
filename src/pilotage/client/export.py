"""A checkpoint's files, downloaded whole or not at all, and checked against what the service says of them."""

import asyncio
import os
import shutil
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel

from pilotage.client.http import Call, Http, Patience
from pilotage.client.jobs import Jobs
from pilotage.client.paths import segment
from pilotage.client.replies import error_of
from pilotage.errors import ConfigError, RequestFailedError, ServiceError
from pilotage.wire.core import checkpoint_digest

_PATIENCE = Patience(total_s=120.0)


class _ExportedFile(BaseModel):
    filename: str
    url: str
    size_bytes: int


class _Export(BaseModel):
    files: tuple[_ExportedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    directory: Path
    num_files: int
    size_bytes: int
    is_digest_checked: bool
    """Whether the service stated a digest, which was then the same; sizes are always checked."""


async def export_checkpoint(http: Http, job_id: str, checkpoint_id: str, directory: Path) -> Exported:
    """Download a checkpoint into a new directory.

    Raises:
        ConfigError: the directory is there already.
        NotFoundError: no such checkpoint.
        RequestFailedError: a file is not of the stated size, or the whole not of the stated digest.
    """
    _require_new(directory)
    record = await Jobs(http).checkpoint(job_id, checkpoint_id)
    path = f"/{segment(job_id)}/checkpoints/{segment(checkpoint_id)}:export"
    listed = await http.call(
        Call(method="POST", path=path, is_repeatable=True), lambda reply: _Export.model_validate(reply.json())
    )
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        arrived = {f.filename: (f.size_bytes, await _download(http, f, partial)) for f in listed.files}
        if record is not None and checkpoint_digest(arrived) != record.sha256:
            raise RequestFailedError(
                f"checkpoint {checkpoint_id} arrived with another digest than {record.sha256}; try again"
            )
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        directory=directory,
        num_files=len(listed.files),
        size_bytes=sum(file.size_bytes for file in listed.files),
        is_digest_checked=record is not None,
    )


def _require_new(directory: Path) -> None:
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another directory")


async def _download(http: Http, file: _ExportedFile, directory: Path) -> str:
    """Download one file; returns its digest."""
    target = _target(directory, file.filename)
    target.parent.mkdir(parents=True, exist_ok=True)
    deadline, pause_s = time.monotonic() + _PATIENCE.total_s, _PATIENCE.first_s
    while True:
        try:
            return await _attempt(http, file, target)
        except (httpx.TransportError, OSError) as error:
            if isinstance(error, OSError) or time.monotonic() + pause_s > deadline:
                said = http.connection.redact(str(error))
                raise RequestFailedError(f"{file.filename} could not be downloaded: {said}") from error
        except ServiceError as error:
            if error.status not in (429, 502, 503, 504) or time.monotonic() + pause_s > deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PATIENCE.longest_s)


async def _attempt(http: Http, file: _ExportedFile, target: Path) -> str:
    digest, size = sha256(), 0
    async with http.stream(_checked_url(file.url, http)) as response:
        if response.status_code != 200:
            raise error_of(response, await response.aread(), call=f"GET {file.filename}")
        with target.open("wb") as out:
            async for part in response.aiter_raw():
                size += len(part)
                if size > file.size_bytes:
                    break
                digest.update(part)
                await asyncio.to_thread(out.write, part)
            out.flush()
            os.fsync(out.fileno())
    if size != file.size_bytes:
        raise RequestFailedError(f"{file.filename} has not the stated {file.size_bytes} bytes; export again")
    return digest.hexdigest()


def _target(directory: Path, name: str) -> Path:
    """Return where a file goes.

    Raises:
        RequestFailedError: outside of the directory.
    """
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise RequestFailedError(f"the service names a file {name!r}, which is no path below a directory")
    return directory.joinpath(*parts)


def _checked_url(url: str, http: Http) -> str:
    """Return a URL that may be asked: of the service itself, or of storage over TLS."""
    parts = urlsplit(url)
    if parts.scheme not in ("", "https") and f"{parts.scheme}://{parts.netloc}" != http.connection.origin:
        raise RequestFailedError(f"the service names {parts.scheme}://{parts.netloc}, which is not over TLS")
    return url
