"""Jobs of a training service: create, wait, list, cancel, and read what they left."""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from getpass import getuser
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from pilotage.client.http import Call, Http, Patience, Reply, json_call
from pilotage.client.paths import segment
from pilotage.errors import (
    ConfigError,
    ConflictError,
    JobFailedError,
    LostReplyError,
    NotFoundError,
    ServiceError,
    WaitTimeoutError,
)
from pilotage.wire.core import PROTOCOL_VERSION, Capabilities, CheckpointRecord, MetricPage
from pilotage.wire.jobs import (
    HARDWARE,
    CapacityRecord,
    CreateJobBody,
    JobRecord,
    JobStatus,
    normalised_status,
)

_log = logging.getLogger(__name__)
_POLL_FIRST_S, _POLL_FACTOR, _POLL_LONGEST_S = 0.2, 1.25, 6.0
_CANCEL_S = 20.0
"""Longest that a driver which is ending tries to cancel its job; its lease does it otherwise."""
_FORGET_S = 5.0
"""Longest that a service is told about a request that nobody waits for any more."""
_FIRST_CALL_S = 20.0
_TAIL_LINES = 20


def new_job_id() -> str:
    """Return an id that nobody has."""
    return f"pilotage-{uuid.uuid4().hex}"


def default_comment() -> str:
    """Return the mark of jobs of this user on this machine."""
    return f"pilotage:{getuser()}@{socket.gethostname()}"


class Jobs:
    """The control plane of one service."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def capabilities(self) -> Capabilities | None:
        """Return what the server offers beyond the stock wire; None for a server that knows only that.

        The first call of a run: a server that is not there is said to be so soon, as nothing is lost yet.

        Raises:
            ConfigError: its core is of another version.
        """
        patience = Patience(total_s=_FIRST_CALL_S)
        call = Call(method="GET", path="/capabilities", is_repeatable=True, patience=patience)
        try:
            found = await self._http.call(call, _capabilities)
        except (NotFoundError, ConflictError):
            return None  # a stock server takes it for a job id
        except ServiceError as error:
            if error.status in (400, 405):
                return None
            raise
        if isinstance(found, int):
            raise ConfigError(
                f"the service speaks version {found} of the core, and this Pilotage version"
                f" {PROTOCOL_VERSION}; run the same Pilotage on both sides"
            )
        return found

    async def create(self, body: CreateJobBody, *, on_id: Callable[[str], None], is_strict: bool) -> str:
        """Create a job and return its id.

        A job whose creation got no reply is looked for by its id, so that it is neither lost nor made twice.

        Args:
            on_id: writes an id to disk: of the job before it is asked for, and again where the server chose
                another one.
            is_strict: whether the server has the strict core: it then knows our extras, and refuses a second
                job of the same id, so that the call may be repeated.

        Raises:
            CapacityError: it can never be placed, or a quota is used up.
            ServiceError: it was refused, or its fate cannot be known.
        """
        wanted = body.job_id or new_job_id()
        on_id(wanted)
        call = json_call("POST", "", _create_content(body, wanted, keeps_extras=is_strict))
        try:
            job_id = await self._http.call(call, _job_id)
        except LostReplyError:
            job_id = await self._find_or_repeat(call, wanted, may_repeat=is_strict)
        if job_id != wanted:
            on_id(job_id)
        return job_id

    async def _find_or_repeat(self, call: Call, job_id: str, *, may_repeat: bool) -> str:
        """Settle a creation without a reply: the job is there, or (where that is safe) is made now."""
        try:
            return (await self.get(job_id)).job_id
        except NotFoundError:
            if not may_repeat:
                raise LostReplyError(
                    f"creating job {job_id} got no reply, and the service does not show it; look at `pilotage"
                    " jobs list --mine` before starting again, it may still appear"
                ) from None
        try:
            return await self._http.call(replace(call, is_repeatable=True), _job_id)
        except ConflictError:  # the first one arrived after all
            return (await self.get(job_id)).job_id

    async def get(self, job_id: str) -> JobRecord:
        """Return a job.

        Raises:
            NotFoundError: there is none of that id, or it is somebody else's.
        """
        call = Call(method="GET", path=f"/{segment(job_id)}", is_repeatable=True)
        return await self._http.call(call, lambda reply: JobRecord.model_validate(_unwrapped(reply)))

    async def find(
        self, *, statuses: frozenset[str] = frozenset(), comment: str | None = None
    ) -> list[JobRecord]:
        """Return jobs, oldest first.

        Args:
            statuses: only these; empty is all. Filtered here: servers differ in what they filter.
            comment: only jobs with it.
        """
        call = Call(method="GET", is_repeatable=True)
        jobs = await self._http.call(call, lambda reply: _JOBS.validate_python(_listed(reply, "jobs")))
        jobs = [job for job in jobs if not statuses or normalised_status(job.status) in statuses]
        jobs = [job for job in jobs if comment is None or job.comment == comment]
        return sorted(jobs, key=lambda job: (job.created_at, job.job_id))

    async def cancel(self, job_id: str) -> None:
        """Cancel a job; again is fine.

        Raises:
            ConflictError: it ended otherwise.
        """
        call = Call(method="POST", path=f"/{segment(job_id)}:cancel", is_repeatable=True)
        await self._http.call(call, lambda reply: None)

    async def release(self, job_id: str) -> None:
        """Cancel a job that is not needed any more, within a bound; an ended one is fine.

        Raises:
            ServiceError: it could not be cancelled; it may hold GPUs.
        """
        call = Call(
            method="POST",
            path=f"/{segment(job_id)}:cancel",
            is_repeatable=True,
            timeout_s=_CANCEL_S,
            patience=Patience(total_s=_CANCEL_S),
        )
        try:
            await self._http.call(call, lambda reply: None)
        except (ConflictError, NotFoundError):
            return

    async def wait_running(self, job_id: str, *, timeout_s: float) -> JobRecord:
        """Wait until a job runs. Who gives up on a job of its own cancels it.

        Raises:
            JobFailedError: it ended instead; the error has its reason and the end of its log.
            WaitTimeoutError: it did not run in time.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _POLL_FIRST_S
        while True:
            job = await self.get(job_id)
            if normalised_status(job.status) == JobStatus.RUNNING:
                return job
            if job.is_ended:
                raise await self.failure(job)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeoutError(
                    f"job {job_id} was still {normalised_status(job.status)} after {timeout_s:g} s; look at"
                    " `pilotage capacity`, or give it longer"
                )
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * _POLL_FACTOR, _POLL_LONGEST_S)

    async def cancel_request(self, job_id: str, request_id: str, *, is_repeatable: bool) -> None:
        """Tell the service that nobody waits for a request any more; within a bound, and never an error."""
        body = {"operation_type": "cancel-request", "payload": {"request_id": request_id}}
        call = json_call(
            "POST",
            f"/{segment(job_id)}/operation",
            body,
            is_repeatable=is_repeatable,
            timeout_s=_FORGET_S,
            patience=Patience(total_s=_FORGET_S),
        )
        try:
            await self._http.call(call, lambda reply: None)
        except ServiceError as error:
            _log.info("request %s was not cancelled: %s", request_id, error)

    async def failure(self, job: JobRecord) -> JobFailedError:
        """Return the error that stands for a job which ended, with its reason and the end of its log."""
        try:
            tail = (await self.logs(job.job_id, max_lines=1000)).lines[-_TAIL_LINES:]
        except ServiceError:
            tail = ()
        reason = job.reason or "no reason given"
        error = JobFailedError(f"job {job.job_id} is {normalised_status(job.status)}: {reason}")
        error.log_tail = tail
        return error

    async def capacity(self, hardware: str | None = None) -> dict[str, CapacityRecord]:
        """Return the GPUs of one kind, or of every kind."""
        kinds = HARDWARE if hardware is None else (hardware,)
        found: dict[str, CapacityRecord] = {}
        for kind in kinds:
            call = Call(
                method="GET",
                path="/capacity",
                query={"hardware": kind},
                is_repeatable=True,
                timeout_s=30.0,
                patience=Patience(total_s=10.0),
            )
            found[kind] = await self._http.call(
                call, lambda reply: CapacityRecord.model_validate(reply.json())
            )
        return found

    async def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Return a job's checkpoints, oldest first, as the server describes them."""
        call = Call(method="GET", path=f"/{segment(job_id)}/checkpoints", is_repeatable=True)
        found = await self._http.call(
            call, lambda reply: _RECORDS.validate_python(_listed(reply, "checkpoints"))
        )
        return sorted(found, key=lambda record: str(record.get("created_at", "")))

    async def checkpoint(self, job_id: str, checkpoint_id: str) -> CheckpointRecord | None:
        """Return one checkpoint's record; None where the server does not say all of it."""
        for record in await self.checkpoints(job_id):
            if record.get("checkpoint_id") == checkpoint_id:
                known = {key: record[key] for key in CheckpointRecord.model_fields if key in record}
                try:
                    return CheckpointRecord.model_validate(known)
                except ValidationError:
                    return None
        raise NotFoundError(f"job {job_id} has no checkpoint {checkpoint_id}; list them first")

    async def logs(self, job_id: str, *, cursor: str | None = None, max_lines: int = 500) -> "LogPage":
        """Return a page of the job's log."""
        payload: dict[str, Any] = {"max_lines": max_lines} | ({"cursor": cursor} if cursor else {})
        body = {"operation_type": "tail-logs", "payload": payload}
        call = json_call("POST", f"/{segment(job_id)}/operation", body, is_repeatable=True)
        return await self._http.call(call, _log_page)

    async def metrics(
        self, job_id: str, *, cursor: int = 0, series: Literal["trainer", "gpu"] = "trainer"
    ) -> MetricPage:
        """Return a series' records from a cursor on.

        Raises:
            NotFoundError: there is no such job, or the server keeps none.
        """
        path = f"/{segment(job_id)}/core/metrics"
        call = Call(
            method="GET", path=path, query={"cursor": str(cursor), "series": series}, is_repeatable=True
        )
        return await self._http.call(call, lambda reply: MetricPage.model_validate(reply.json()))


_JOBS = TypeAdapter(list[JobRecord])
_RECORDS = TypeAdapter(list[dict[str, Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Lines of a job's log, in order."""

    lines: tuple[str, ...]
    next_cursor: str | None
    is_end: bool
    """Whether it reaches the end of what there is now."""


def _log_page(reply: Reply) -> LogPage:
    body = reply.json()
    entries = body.get("entries") or []
    cursor = body.get("next_cursor")
    return LogPage(
        lines=tuple(map(_line, entries)),
        next_cursor=None if cursor is None else str(cursor),
        is_end=bool(body.get("eof")),
    )


def _line(entry: Any) -> str:
    """Return one log entry as a line."""
    if not isinstance(entry, dict):
        return str(entry)
    if "_raw" in entry:
        return str(entry["_raw"])
    message = entry.get("msg", entry.get("message", ""))
    return " ".join(str(p) for p in (entry.get("ts"), entry.get("level"), entry.get("logger"), message) if p)


def _create_content(body: CreateJobBody, job_id: str, *, keeps_extras: bool) -> dict[str, Any]:
    """Return what is sent: absent values, empty lists and, for a stock server, our extras are left out."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return [kept(item) for item in value] if isinstance(value, list) else value
        return {
            key: kept(item)
            for key, item in value.items()
            if item not in (None, []) and (keeps_extras or not key.startswith("x-"))
        }

    return kept(body.model_dump(mode="json", by_alias=True)) | {"job_id": job_id}


def _job_id(reply: Reply) -> str:
    job_id = reply.json().get("job_id")
    if not isinstance(job_id, str) or not job_id:
        raise ValueError("it has no job_id")
    return job_id


def _unwrapped(reply: Reply) -> Any:
    body = reply.json()
    return body["job"] if isinstance(body, dict) and isinstance(body.get("job"), dict) else body


def _listed(reply: Reply, key: str) -> Any:
    body = reply.json()
    return body.get(key, []) if isinstance(body, dict) else body


def _capabilities(reply: Reply) -> Capabilities | int:
    """Read what a service says of itself, or just its version where it is another than ours."""
    content: Any = reply.json()
    version = content.get("version") if isinstance(content, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        return version
    return Capabilities.model_validate(content)
