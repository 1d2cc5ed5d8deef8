"""Commands that talk to a training service: capacity, jobs."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pilotage.client import Http, Jobs, Patience, default_comment, resolve_connection
from pilotage.client.export import export_checkpoint
from pilotage.errors import ConfigError, ConflictError, JobFailedError, NotFoundError
from pilotage.wire.jobs import JobRecord, normalised_status, read_statuses

_FOLLOW_S = 1.0


async def capacity(arguments: argparse.Namespace) -> int:
    """Print the GPUs of one kind, or of every kind."""
    async with _service() as http:
        found = await Jobs(http).capacity(arguments.hardware)
    if arguments.json:
        _print_json({kind: record.model_dump() for kind, record in found.items()})
        return 0
    columns = ("max_total_gpus", "in_use_gpus", "pending_gpus", "available_gpus")
    rows = [[kind, *(_gpus(getattr(record, name)) for name in columns)] for kind, record in found.items()]
    _print_table(("hardware", "total", "in use", "pending", "available"), rows)
    return 0


def _gpus(count: int) -> str:
    return "no limit" if count < 0 else str(count)


async def list_jobs(arguments: argparse.Namespace) -> int:
    """Print jobs, oldest first."""
    statuses = _statuses(arguments.status)
    async with _service() as http:
        found = await Jobs(http).find(statuses=statuses, comment=_my_comment() if arguments.mine else None)
    if arguments.json:
        _print_json({"jobs": [job.model_dump(exclude_none=True) for job in found]})
        return 0
    rows = [
        [
            job.job_id,
            normalised_status(job.status),
            job.created_at[:19].replace("T", " "),
            job.hardware or "",
            job.submitted_by or "",
            job.comment or "",
            job.reason or "",
        ]
        for job in found
    ]
    _print_table(("job", "status", "created", "hardware", "owner", "comment", "reason"), rows)
    return 0


async def get(arguments: argparse.Namespace) -> int:
    """Print one job."""
    async with _service() as http:
        _print_job(await Jobs(http).get(arguments.job), as_json=arguments.json)
    return 0


async def wait(arguments: argparse.Namespace) -> int:
    """Wait until a job runs; the job is not cancelled when the wait ends."""
    async with _service() as http:
        try:
            job = await Jobs(http).wait_running(arguments.job, timeout_s=arguments.timeout)
        except JobFailedError as error:
            for line in error.log_tail:
                sys.stderr.write(f"  {line}\n")
            raise
    _print_job(job, as_json=arguments.json)
    return 0


async def cancel(arguments: argparse.Namespace) -> int:
    """Cancel a job of mine, or with --force any that the token may."""
    async with _service() as http:
        jobs = Jobs(http)
        job = await jobs.get(arguments.job)
        if not arguments.force and job.comment != _my_comment():
            raise ConflictError(
                f"job {job.job_id} has the comment {job.comment!r}, not yours ({_my_comment()!r}); give"
                " --force to cancel it all the same"
            )
        await jobs.cancel(arguments.job)
    if arguments.json:
        _print_json({"job_id": arguments.job, "cancelled": True})
    else:
        print(f"cancelled {arguments.job}")
    return 0


async def logs(arguments: argparse.Namespace) -> int:
    """Print a job's log; with --follow until the job has ended."""
    async with _service() as http:
        jobs = Jobs(http)
        cursor: str | None = None
        while True:
            page = await jobs.logs(arguments.job, cursor=cursor)
            for line in page.lines:
                print(json.dumps({"line": line}) if arguments.json else line, flush=True)
            is_caught_up = page.is_end or not page.lines or page.next_cursor in (None, cursor)
            cursor = page.next_cursor or cursor
            if not is_caught_up:
                continue
            if not arguments.follow or (await jobs.get(arguments.job)).is_ended:
                return 0
            await asyncio.sleep(_FOLLOW_S)


async def metrics(arguments: argparse.Namespace) -> int:
    """Print what the trainer measured, or the job's GPUs."""
    async with _service() as http:
        jobs, cursor, records = Jobs(http), 0, list[Any]()
        while True:
            page = await jobs.metrics(
                arguments.job, cursor=cursor, series="gpu" if arguments.gpu else "trainer"
            )
            records += page.records
            if not page.records or page.next_cursor == cursor:
                break
            cursor = page.next_cursor
    if arguments.json:
        _print_json({"records": [record.model_dump() for record in records]})
        return 0
    rows = [
        [
            str(record.cursor),
            record.verb,
            f"{record.duration_s:.2f}",
            "  ".join(f"{name} {value:.6g}" for name, value in record.values.items()),
        ]
        for record in records
    ]
    _print_table(("#", "verb", "seconds", "values"), rows)
    return 0


async def checkpoints(arguments: argparse.Namespace) -> int:
    """Print a job's checkpoints, oldest first."""
    async with _service() as http:
        found = await Jobs(http).checkpoints(arguments.job)
    if arguments.json:
        _print_json({"checkpoints": found})
        return 0
    columns = ("checkpoint_id", "checkpoint_type", "global_steps", "created_at", "size_bytes")
    rows = [[str(record.get(name, "")) for name in columns] for record in found]
    _print_table(("checkpoint", "type", "steps", "created", "bytes"), rows)
    return 0


async def export(arguments: argparse.Namespace) -> int:
    """Download a checkpoint: the named one, or the newest."""
    async with _service() as http:
        checkpoint_id = arguments.checkpoint
        if checkpoint_id is None:
            found = await Jobs(http).checkpoints(arguments.job)
            if not found:
                raise NotFoundError(f"job {arguments.job} has no checkpoints")
            checkpoint_id = str(found[-1]["checkpoint_id"])
        done = await export_checkpoint(http, arguments.job, checkpoint_id, arguments.out)
    if arguments.json:
        _print_json(
            {
                "checkpoint_id": checkpoint_id,
                "directory": str(done.directory),
                "num_files": done.num_files,
                "size_bytes": done.size_bytes,
                "is_digest_checked": done.is_digest_checked,
            }
        )
    else:
        checked = "sizes and digest" if done.is_digest_checked else "sizes"
        print(f"{checkpoint_id}: {done.num_files} files, {done.size_bytes} bytes; {checked} checked")
        print(f"wrote {done.directory}")
    return 0


# --- parts ---


@contextlib.asynccontextmanager
async def _service() -> AsyncGenerator[Http]:
    async with Http(resolve_connection(), patience=Patience(total_s=30.0)) as http:
        yield http


def _my_comment() -> str:
    return os.environ.get("ARCTIC_CORTEX_JOB_COMMENT") or default_comment()


def _statuses(text: str | None) -> frozenset[str]:
    try:
        return read_statuses(text)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def _print_job(job: JobRecord, *, as_json: bool) -> None:
    if as_json:
        _print_json(job.model_dump(exclude_none=True))
        return
    fields = job.model_dump(exclude_none=True, exclude={"sub_jobs"})
    rows = [[name, str(value)] for name, value in fields.items()]
    rows += [[sub_job.sub_job_id, f"{sub_job.status} {sub_job.model_name}"] for sub_job in job.sub_jobs]
    _print_table(("", ""), rows)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=True))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, show_header=any(columns), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty()).print(table)
