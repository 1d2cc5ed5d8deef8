"""The OpenAPI 3.1 document of the front, for clients in other languages and for fuzzers.

The bodies are those of the pydantic models that read them, so that the document cannot differ from the code;
the routes are the table below. Frames are octet streams: `wire.frames` and `wire.samples` describe them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from pilotage.service.core_routes import MAX_WAIT_S
from pilotage.service.stock_routes import OperationBody, StepBody, StockLoadBody, StockSaveBody
from pilotage.service.tinker_bodies import (
    CreateModelBody,
    FutureBody,
    HeartbeatBody,
    ModelBody,
    OptimStepBody,
    RestoreBody,
    SampleBody,
    SamplingSessionBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    SessionBody,
    WeightsBody,
)
from pilotage.service.tinker_front import PREFIX as TINKER
from pilotage.types import AdamParams, StepResult
from pilotage.wire.core import (
    HTTP_STATUS,
    METRIC_SERIES,
    OCTET_STREAM,
    OPERATION_ID_PATTERN,
    PROTOCOL_VERSION,
    SEQUENCED_VERBS,
    Capabilities,
    CheckpointRecord,
    CoreState,
    ErrorBody,
    LeaseBody,
    LeaseState,
    LoadBody,
    MetricPage,
    OperationState,
    PublishResult,
    SaveBody,
)
from pilotage.wire.jobs import HARDWARE, CapacityRecord, CreateJobBody, JobRecord
from pilotage.wire.tinker import PROTOBUF

type Schema = dict[str, Any]

_PLACE = "/api/v2/databases/{database}/schemas/{schema}/{endpoint}"
_JOB = f"{_PLACE}/{{job_id}}"
_JSON = "application/json"
_READ = (CreateJobBody, LeaseBody, SaveBody, LoadBody, AdamParams, StepBody, StockSaveBody, StockLoadBody,
         OperationBody, CreateModelBody, FutureBody, HeartbeatBody, ModelBody, RestoreBody,
         SamplingSessionBody, SessionBody, WeightsBody, OptimStepBody, SampleBody, SaveForSamplerBody,
         SaveWeightsBody)  # fmt: skip
"""Types that a request's body is read as ..."""
_WRITTEN = (ErrorBody, Capabilities, LeaseState, CoreState, OperationState, PublishResult, CheckpointRecord,
            MetricPage, JobRecord, CapacityRecord, StepResult)  # fmt: skip
"""... and that a reply is written from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """One operation."""

    method: str
    path: str
    summary: str
    body: type | Literal["frame", "protobuf"] | None = None
    reply: type | Literal["frame", "file", "text"] | None = None
    """None is a JSON object that the reference describes."""
    query: tuple[str, ...] = ()
    success: tuple[int, ...] = (200,)


_WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 10**14}
_QUERY: Mapping[str, Schema] = {
    "operation_id": {"type": "string", "pattern": OPERATION_ID_PATTERN},
    "sequence": {"type": "integer", "minimum": 1, "maximum": 2**62 - 1},
    "wait_s": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
    "status": {"type": "string"},
    "database": {"type": "string"},
    "schema": {"type": "string"},
    "submitted_by": {"type": "string"},
    "created_after": {"type": "string", "format": "date"},
    "created_before": {"type": "string", "format": "date"},
    "page_token": _WHOLE,
    "limit": _WHOLE,
    "hardware": {"type": "string", "enum": list(HARDWARE)},
    "cursor": _WHOLE,
    "series": {"enum": list(METRIC_SERIES)},
    "max_lines": _WHOLE,
    "max_events": _WHOLE,
}
_REQUIRED = ("operation_id", "sequence")
_FREE = ("operation_id", "wait_s")
_SEQUENCED = (*_FREE, "sequence")
_LISTED = (
    "status", "database", "schema", "submitted_by", "created_after", "created_before", "page_token", "limit",
)  # fmt: skip


def _core(
    verb: str, summary: str, body: type | Literal["frame"] | None, reply: type | Literal["frame"] | None
) -> _Route:
    query = _SEQUENCED if verb in SEQUENCED_VERBS else _FREE
    return _Route(
        method="post", path=f"{_JOB}/core/{verb}", summary=summary, body=body, reply=reply, query=query,
        success=(200, 202),
    )  # fmt: skip


def _tinker(name: str, summary: str, body: type | Literal["protobuf"] | None = None) -> _Route:
    return _Route(method="post", path=f"{TINKER}/{name}", summary=summary, body=body)


_RUN = f"{TINKER}/training_runs/{{model_id}}/checkpoints"
_TINKER_ROUTES = (
    _Route(method="get", path=f"{TINKER}/healthz", summary="Say that the service runs"),
    _Route(method="get", path=f"{TINKER}/get_server_capabilities", summary="List models"),
    _Route(method="get", path=f"{TINKER}/samplers/{{sampler_id}}", summary="Describe a sampling client"),
    _Route(method="get", path=_RUN, summary="List a model's checkpoints"),
    _Route(method="delete", path=f"{_RUN}/{{kind}}/{{name}}", summary="Delete a checkpoint", success=(204,)),
    _tinker("client/config", "Say how the SDK is to behave"),
    _tinker("client/dynamic_config", "Say the same, again and again"),
    _tinker("sessions/{session_id}/finish", "End a session's jobs"),
    _tinker("create_session", "Open a session", SessionBody),
    _tinker("session_heartbeat", "Keep a session's jobs", HeartbeatBody),
    _tinker("create_model", "Make a model to train", CreateModelBody),
    _tinker("get_info", "Describe a model", ModelBody),
    _tinker("weights_info", "Describe saved weights", WeightsBody),
    _tinker("forward_backward", "Add a gradient", "protobuf"),
    _tinker("forward", "Score datums", "protobuf"),
    _tinker("optim_step", "Apply the gradient", OptimStepBody),
    _tinker("save_weights", "Write a checkpoint", SaveWeightsBody),
    _tinker("save_weights_for_sampler", "Give the sampler the weights", SaveForSamplerBody),
    _tinker("load_weights", "Restore a checkpoint", RestoreBody),
    _tinker("create_sampling_session", "Make a sampling client", SamplingSessionBody),
    _tinker("asample", "Sample", SampleBody),
    _tinker("retrieve_future", "Get a result", FutureBody),
    _tinker("cancel_future", "Cancel a request", FutureBody),
    _tinker("telemetry", "Take what the SDK tells, and keep nothing"),
)
_ROUTES = (
    *_TINKER_ROUTES,
    _Route(method="get", path="/health", summary="Say that the service runs"),
    _Route(method="get", path="/metrics", summary="Answer a scrape by Prometheus", reply="text"),
    _Route(
        method="get", path="/api/v2/{endpoint}", summary="List the caller's jobs everywhere", query=_LISTED
    ),
    _Route(method="post", path=_PLACE, summary="Create a job", body=CreateJobBody),
    _Route(method="get", path=_PLACE, summary="List jobs", query=("status",)),
    _Route(
        method="get",
        path=f"{_PLACE}/capacity",
        summary="Count GPUs",
        reply=CapacityRecord,
        query=("hardware",),
    ),
    _Route(
        method="get", path=f"{_PLACE}/capabilities", summary="Say what the server offers", reply=Capabilities
    ),
    _Route(method="get", path=_JOB, summary="Get a job", reply=JobRecord),
    _Route(method="post", path=f"{_JOB}:cancel", summary="Cancel a job"),
    _Route(method="get", path=f"{_JOB}/experiment-run", summary="Name the job's experiment run"),
    _Route(method="get", path=f"{_JOB}/checkpoints", summary="List checkpoints"),
    _Route(
        method="delete",
        path=f"{_JOB}/checkpoints/{{checkpoint_id}}",
        summary="Delete a checkpoint",
        success=(204,),
    ),
    _Route(
        method="post",
        path=f"{_JOB}/checkpoints/{{checkpoint_id}}:export",
        summary="List a checkpoint's files",
    ),
    _Route(
        method="get",
        path=f"{_JOB}/checkpoints/{{checkpoint_id}}/files/{{name}}",
        summary="Download a checkpoint's file",
        reply="file",
    ),
    _Route(method="post", path=f"{_JOB}/forward-backward", summary="Add a gradient", body="frame"),
    _Route(method="post", path=f"{_JOB}/step", summary="Apply the gradient", body=StepBody),
    _Route(method="post", path=f"{_JOB}/save", summary="Write a checkpoint", body=StockSaveBody),
    _Route(method="post", path=f"{_JOB}/load", summary="Restore a checkpoint", body=StockLoadBody),
    _Route(method="post", path=f"{_JOB}/generate", summary="Sample completions", body="frame"),
    _Route(
        method="post", path=f"{_JOB}/generate-stream", summary="Sample; results as they come", body="frame"
    ),
    _Route(method="post", path=f"{_JOB}/operation", summary="Run a named operation", body=OperationBody),
    _Route(
        method="get",
        path=f"{_JOB}/requests/{{request_id}}",
        summary="Poll a request",
        query=("cursor", "max_events"),
    ),
    _Route(method="get", path=f"{_JOB}/core", summary="Say where the engine stands", reply=CoreState),
    _Route(
        method="post", path=f"{_JOB}/core/lease", summary="Renew the lease", body=LeaseBody, reply=LeaseState
    ),
    _core("forward_backward", "Add a gradient", "frame", "frame"),
    _core("step", "Apply the gradient", AdamParams, StepResult),
    _core("discard", "Drop the accumulated gradient", None, None),
    _core("publish", "Give the sampler the trainer's weights", None, PublishResult),
    _core("save", "Write a checkpoint", SaveBody, CheckpointRecord),
    _core("load", "Restore a checkpoint", LoadBody, CheckpointRecord),
    _core("sample", "Sample one completion", "frame", "frame"),
    _core("forward", "Score samples", "frame", "frame"),
    _Route(
        method="get",
        path=f"{_JOB}/core/operations/{{operation_id}}",
        summary="Get an operation's outcome",
        query=("wait_s",),
        success=(200, 202),
    ),
    _Route(
        method="get",
        path=f"{_JOB}/core/metrics",
        summary="Read the metric series",
        reply=MetricPage,
        query=("cursor", "series"),
    ),
    _Route(
        method="get", path=f"{_JOB}/core/logs", summary="Read the engine's log", query=("cursor", "max_lines")
    ),
)


@cache
def document() -> Schema:
    """Return the document; whoever changes it changes everybody's."""
    paths: dict[str, Schema] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    token = {"type": "http", "scheme": "bearer", "description": "`pilotage token` makes one."}
    key = {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "tml- and the token."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pilotage training service", "version": str(PROTOCOL_VERSION)},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"token": token, "key": key}},
    }


def _operation(route: _Route) -> Schema:
    operation: Schema = {
        "summary": route.summary,
        "operationId": f"{route.method} {route.path.removeprefix(_PLACE) or route.path}",
        "parameters": [*_path_parameters(route.path), *map(_query_parameter, route.query)],
        "responses": _responses(route),
    }
    if route.path in ("/health", f"{TINKER}/healthz"):
        operation["security"] = []
    elif route in _TINKER_ROUTES:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _path_parameters(path: str) -> list[Schema]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameter(name: str) -> Schema:
    return {"name": name, "in": "query", "required": name in _REQUIRED, "schema": _QUERY[name]}


def _responses(route: _Route) -> Schema:
    errors = {"description": "See the code and the message", "content": _content(ErrorBody)}
    responses: Schema = {str(status): dict(errors) for status in sorted({405, *HTTP_STATUS.values()})}
    for status in route.success:
        responses[str(status)] = {"description": "Done"}
        if status == 200:
            responses["200"]["content"] = _content(route.reply)
    if 202 in route.success:
        responses["202"] = {"description": "Not done yet", "content": _content(OperationState)}
    return responses


def _content(kind: type | Literal["frame", "file", "text", "protobuf"] | None) -> Schema:
    if kind is None:
        return {_JSON: {"schema": {"type": "object"}}}
    if kind == "text":
        return {"text/plain": {"schema": {"type": "string"}}}
    if kind == "protobuf":
        return {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}
    if isinstance(kind, str):
        return {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _schemas() -> Schema:
    read = [(t.__name__, "validation", TypeAdapter[Any](t)) for t in _READ]
    written = [(t.__name__, "serialization", TypeAdapter[Any](t)) for t in _WRITTEN]
    inputs: Any = [*read, *written]
    named, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    schemas: Schema = dict(shared.get("$defs", {}))
    for (name, _), schema in named.items():
        if schema.get("$ref") != f"#/components/schemas/{name}":
            schemas[str(name)] = schema
    return schemas
