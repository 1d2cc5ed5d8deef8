"""The front: who may ask what of which job. Jobs, checkpoints and logs it answers itself; the rest it sends
on to the job's engine.

    authorise -> find the job (of that owner, in that database and schema) -> answer, or forward

A token is looked up by its digest and appears in no log and no reply. A job of somebody else does not exist.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import date
from typing import Any
from urllib.parse import quote

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotage.service.bodies import json_object, parse, whole_number
from pilotage.service.core_routes import MAX_WAIT_S, SOURCE_HEADER
from pilotage.service.forwarding import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, forward, read_bounded
from pilotage.service.jobs import Job, Jobs, Place
from pilotage.service.logs import read_page, tail
from pilotage.service.measures import JobCollector, RequestMeter
from pilotage.service.openapi import document
from pilotage.service.refusals import Refusal, error_response, exception_handlers, json_response
from pilotage.service.tinker_front import TinkerFront
from pilotage.service.tinker_models import TinkerTerms
from pilotage.service.tokens import TokenBook
from pilotage.types import PolicyLoss, Reduction
from pilotage.wire.core import (
    METRIC_SERIES,
    Capabilities,
    ErrorCode,
    LeaseBody,
    LeaseState,
    MetricPage,
    MetricRecord,
)
from pilotage.wire.jobs import ENDED, HARDWARE, CreateJobBody, read_statuses

_LOG = logging.getLogger(__name__)
PREFIX = "/api/v2/databases/{database}/schemas/{schema}/{endpoint}"
_PREFIX_SEGMENTS = len(PREFIX.split("/")) + 1
"""Of a job's path: what follows is the engine's."""
MIN_LEASE_S = 5.0
_SMALL_BODY_BYTES = 2**20
_OPERATION_BYTES = 16 * 2**20
_LOG_TAIL_LINES = 20


class Service:
    """The app, and the life of the jobs behind it."""

    def __init__(self, jobs: Jobs, tokens: TokenBook | None, *, tinker: TinkerTerms | None = None) -> None:
        """Args:
        tokens: None answers everybody as the owner `local`; for loopback only.
        """
        self._jobs = jobs
        self._tokens = tokens
        self._tinker = TinkerFront(
            jobs, self._owner_of, terms=tinker or TinkerTerms(), shows_paths=tokens is None
        )
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(jobs))
        self.app = Starlette(
            routes=[Route("/health", _health), Route("/openapi.json", _openapi), *self._routes()],
            middleware=[Middleware(RequestMeter, registry=self._registry), Middleware(_Envelope)],
            exception_handlers=exception_handlers("the service"),
        )
        # A redirect has no error body, and repeats the caller's Host.
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route | Mount]:
        def job(path: str, handler: Callable[[Request, Job], Awaitable[Response]], *methods: str) -> Route:
            async def endpoint(request: Request) -> Response:
                return await handler(request, self._job(request))

            return Route(f"{PREFIX}/{{job_id}}{path}", endpoint, methods=list(methods), name=path or "job")

        data_plane = [
            job(f"/{name}", self._data_plane, "POST")
            for name in ("forward-backward", "step", "save", "generate", "generate-stream")
        ]
        return [
            *self._tinker.routes(),
            Route("/metrics", self._scrape),
            Route("/api/v2/{endpoint}", self._list_all),
            Route(PREFIX, self._create, methods=["POST"]),
            Route(PREFIX, self._list, methods=["GET"]),
            Route(f"{PREFIX}/capacity", self._capacity),
            Route(f"{PREFIX}/capabilities", self._capabilities),
            job(":cancel", self._cancel, "POST"),
            job("/experiment-run", self._experiment_run, "GET"),
            job("/checkpoints", self._checkpoints, "GET"),
            job("/checkpoints/{checkpoint_id}:export", self._export, "POST"),
            job("/checkpoints/{checkpoint_id}/files/{name:path}", self._file, "GET"),
            job("/checkpoints/{checkpoint_id}", self._delete, "DELETE"),
            *data_plane,
            job("/load", self._load, "POST"),
            job("/operation", self._operation, "POST"),
            job("/requests/{request_id}", self._data_plane, "GET"),
            job("/core", self._data_plane, "GET"),
            job("/core/metrics", self._metrics, "GET"),
            job("/core/logs", self._logs, "GET"),
            job("/core/operations/{operation_id}", self._data_plane, "GET"),
            job("/core/lease", self._lease, "POST"),
            job("/core/load", self._load, "POST"),
            job("/core/{verb}", self._data_plane, "POST"),
            job("", self._get, "GET"),
        ]

    # --- who ---

    def _owner(self, request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._owner_of(token.strip() if scheme.lower() == "bearer" else None)

    def _owner_of(self, token: str | None) -> str:
        if self._tokens is None:
            return "local"
        owner = None if token is None else self._tokens.owner_of(token)
        if owner is None:
            raise Refusal(
                ErrorCode.UNAUTHENTICATED,
                "give a valid token as `Authorization: Bearer ...`, or as the SDK's key with tml- before it;"
                " `pilotage token` makes one",
            )
        return owner

    def _place(self, request: Request) -> Place:
        params = request.path_params
        return Place(
            owner=self._owner(request), database=params["database"].upper(), schema=params["schema"].upper()
        )

    def _job(self, request: Request) -> Job:
        return self._jobs.get(self._place(request), request.path_params["job_id"])

    async def _scrape(self, request: Request) -> Response:
        self._owner(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    # --- jobs ---

    async def _create(self, request: Request) -> Response:
        place = self._place(request)
        body = parse(CreateJobBody, await read_bounded(request, _SMALL_BODY_BYTES))
        _require_storable(body)
        job = self._jobs.create(place, body)
        return json_response({"job_id": job.id})

    async def _list(self, request: Request) -> Response:
        wanted = _statuses(request.query_params.get("status"))
        jobs = [job for job in self._jobs.list(self._place(request)) if not wanted or job.status in wanted]
        return json_response({"jobs": [_record(job) for job in jobs]})

    async def _list_all(self, request: Request) -> Response:
        """Answer the account-wide list: filters, a page size and a page token."""
        query = request.query_params
        wanted = _statuses(query.get("status"))
        jobs = [
            job
            for job in self._jobs.list_of_owner(self._owner(request))
            if (not wanted or job.status in wanted)
            and query.get("database", job.place.database).upper() == job.place.database
            and query.get("schema", job.place.schema).upper() == job.place.schema
            and query.get("submitted_by", job.place.owner) == job.place.owner
            and _is_between(job, query.get("created_after"), query.get("created_before"))
        ]
        start, limit = (
            whole_number(query.get("page_token"), 0),
            max(1, min(whole_number(query.get("limit"), 100), 1000)),
        )
        page = [
            _record(job) | {"database_name": job.place.database, "schema_name": job.place.schema}
            for job in jobs[start : start + limit]
        ]
        more = {"next_page_token": str(start + limit)} if start + limit < len(jobs) else {}
        return json_response({"jobs": page, "unknown_status_count": 0} | more)

    async def _get(self, request: Request, job: Job) -> Response:
        return json_response(_record(job))

    async def _cancel(self, request: Request, job: Job) -> Response:
        await self._jobs.cancel(job)
        return json_response({})

    async def _capacity(self, request: Request) -> Response:
        self._owner(request)
        hardware = request.query_params.get("hardware", HARDWARE[0])
        if hardware not in HARDWARE:
            raise Refusal(ErrorCode.INVALID, f"hardware is one of {', '.join(HARDWARE)}", path="hardware")
        return json_response(self._jobs.capacity(hardware).model_dump())

    async def _capabilities(self, request: Request) -> Response:
        self._owner(request)
        document = Capabilities(
            max_request_bytes=MAX_REQUEST_BYTES,
            max_response_bytes=MAX_RESPONSE_BYTES,
            max_wait_s=MAX_WAIT_S,
            min_lease_s=MIN_LEASE_S,
            losses=tuple(PolicyLoss),
            reductions=tuple(Reduction),
        )
        return json_response(document.model_dump())

    async def _experiment_run(self, request: Request, job: Job) -> Response:
        name = job.body.experiment_name or "pilotage"
        return json_response({"experiment_name": name, "experiment_run_name": job.id})

    async def _lease(self, request: Request, job: Job) -> Response:
        body = parse(LeaseBody, await read_bounded(request, _SMALL_BODY_BYTES))
        expires_in_s = self._jobs.renew(job, max(body.lease_s, MIN_LEASE_S))
        return json_response(LeaseState(expires_in_s=expires_in_s, status=job.status).model_dump())

    # --- checkpoints, logs, metrics: from disk, whether the job runs or not ---

    async def _checkpoints(self, request: Request, job: Job) -> Response:
        records = self._jobs.checkpoints_of(job).records()
        return json_response({"checkpoints": [record.model_dump() for record in records]})

    async def _export(self, request: Request, job: Job) -> Response:
        checkpoint_id = request.path_params["checkpoint_id"]
        base = str(request.url).removesuffix(":export")
        files = [
            {"filename": name, "url": f"{base}/files/{name}", "size_bytes": size}
            for name, size in self._jobs.checkpoints_of(job).files(checkpoint_id).items()
        ]
        return json_response({"checkpoint_id": checkpoint_id, "files": files, "expires_at": None})

    async def _file(self, request: Request, job: Job) -> Response:
        params = request.path_params
        path = self._jobs.checkpoints_of(job).file(params["checkpoint_id"], params["name"])
        return FileResponse(path, media_type="application/octet-stream")

    async def _delete(self, request: Request, job: Job) -> Response:
        self._jobs.checkpoints_of(job).delete(request.path_params["checkpoint_id"])
        return Response(status_code=204)

    async def _logs(self, request: Request, job: Job) -> Response:
        return self._log_page(job, request.query_params)

    def _log_page(self, job: Job, wanted: Mapping[str, Any]) -> Response:
        page = read_page(
            self._jobs.log_of(job),
            cursor=whole_number(wanted.get("cursor"), 0),
            max_lines=whole_number(wanted.get("max_lines"), 1000),
            has_ended=job.status in ENDED,
        )
        return json_response(page)

    async def _metrics(self, request: Request, job: Job) -> Response:
        cursor = whole_number(request.query_params.get("cursor"), 0)
        series = request.query_params.get("series", "trainer")
        if series not in METRIC_SERIES:
            raise Refusal(ErrorCode.INVALID, f"series is one of {', '.join(METRIC_SERIES)}", path="series")
        path = self._jobs.directory_of(job) / METRIC_SERIES[series]
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last may be half written
        records = [_metric(index, line) for index, line in enumerate(lines[cursor : cursor + 1000], cursor)]
        page = MetricPage(records=tuple(records), next_cursor=cursor + len(records))
        return Response(page.model_dump_json(), media_type="application/json")

    # --- data plane ---

    async def _data_plane(self, request: Request, job: Job) -> Response:
        return await self._forward(request, job, {})

    async def _load(self, request: Request, job: Job) -> Response:
        """Check that the checkpoint's job may be read, and tell the engine where it is."""
        body = await read_bounded(request, _SMALL_BODY_BYTES)
        source = job
        source_id = _source_job_id(body)
        if source_id is not None:
            source = self._jobs.get(job.place, source_id)
        headers = {SOURCE_HEADER: str(self._jobs.directory_of(source))}
        return await self._forward(request, job, headers, body)

    async def _operation(self, request: Request, job: Job) -> Response:
        body = await read_bounded(request, _OPERATION_BYTES)
        content = json_object(body) if b"tail-logs" in body else {}
        if content.get("operation_type") != "tail-logs":
            return await self._forward(request, job, {}, body)
        payload = content.get("payload") or {}
        if not isinstance(payload, dict):
            raise Refusal(ErrorCode.INVALID, "payload is an object", path="payload")
        return self._log_page(job, payload)

    async def _forward(
        self, request: Request, job: Job, headers: dict[str, str], body: bytes | None = None
    ) -> Response:
        try:
            engine = self._jobs.running_engine(job)
        except Refusal as refusal:
            if refusal.body.code == ErrorCode.ENGINE_LOST:
                lines = tail(self._jobs.log_of(job), _LOG_TAIL_LINES)
                return error_response(refusal.body.model_copy(update={"log_tail": lines}))
            raise
        self._jobs.touch(job)
        segments = request.scope["path"].split("/")[_PREFIX_SEGMENTS:]
        path = "/".join(["", *(quote(segment, safe="") for segment in segments)])
        return await forward(request, engine, path, body=body, headers=headers)


# --- parts ---


def _record(job: Job) -> dict[str, Any]:
    return job.record().model_dump(mode="json", exclude_none=True)


def _statuses(text: str | None) -> frozenset[str]:
    try:
        return read_statuses(text)
    except ValueError as error:
        raise Refusal(ErrorCode.INVALID, str(error), path="status") from None


def _is_between(job: Job, after: str | None, before: str | None) -> bool:
    created = job.record().created_at
    for text in (after, before):
        if text is not None:
            try:
                date.fromisoformat(text[:10])
            except ValueError:
                raise Refusal(ErrorCode.INVALID, f"{text[:40]!r} is no date like 2026-01-31") from None
    return (after is None or created >= after) and (before is None or created < before)


def _source_job_id(body: bytes) -> str | None:
    source = json_object(body).get("source_job_id")
    if source is not None and not isinstance(source, str):
        raise Refusal(ErrorCode.INVALID, "source_job_id is a string", path="source_job_id")
    return source


def _require_storable(body: CreateJobBody) -> None:
    """Refuse what could not be written down and shown again: integers that 64 bits do not hold."""
    try:
        orjson.dumps(body.model_dump(mode="json"))
    except TypeError as error:
        raise Refusal(ErrorCode.INVALID, f"the body cannot be stored: {error}") from None


def _metric(index: int, line: bytes) -> MetricRecord:
    content = orjson.loads(line)
    return MetricRecord(
        cursor=index,
        at=content["at"],
        verb=content["verb"],
        duration_s=content["duration_s"],
        values=content["values"],
    )


async def _health(request: Request) -> Response:
    return json_response({"status": "ok"})


async def _openapi(request: Request) -> Response:
    return json_response(document())


class _Envelope:
    """Gives every reply an id, which clients print with an error, and the time that it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, began = uuid.uuid4().hex.encode(), time.perf_counter()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                timing = b"total;dur=%.3f" % ((time.perf_counter() - began) * 1e3)
                named = [(b"x-snowflake-request-id", request_id), (b"server-timing", timing)]
                message["headers"] = [*message["headers"], *named]
            await send(message)

        await self._app(scope, receive, send_named)
