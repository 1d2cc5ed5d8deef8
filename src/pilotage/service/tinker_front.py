"""The Tinker wire, as the front answers it: sessions, models and sampling clients become jobs.

    model S:train:N      the job S.train.N, one trainer and one sampler (`TinkerTerms` says how large)
    weights by path, or a base model, to sample from: the job of these weights where its sampler has them, or
                         else a job S.sample.N of one sampler
    sampling client      JOB:GENERATION:NAME (`tinker_routes`)
    future               JOB:OPERATION, or JOB:created

Names say where things are, so that nothing about a session is kept here and a front that was killed and
started again knows them all. A session is kept alive by the SDK's heartbeats: they renew the leases of its
jobs, which end without them.

Owners have their own jobs here as on the Cortex wire. The SDK wants keys that start with `tml-`: a token
with that before it.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.service.bodies import json_object, parse
from pilotage.service.core_routes import SOURCE_HEADER
from pilotage.service.forwarding import read_bounded
from pilotage.service.jobs import Job, Jobs, Place
from pilotage.service.refusals import Refusal, json_response
from pilotage.service.tinker_bodies import (
    CreateModelBody,
    FutureBody,
    HeartbeatBody,
    ModelBody,
    RestoreBody,
    SamplingSessionBody,
    SessionBody,
    WeightsBody,
)
from pilotage.service.tinker_models import (
    LEASE_S,
    TinkerTerms,
    adapter_asked,
    adapter_info,
    adapter_of,
    context_tokens,
    job_body,
    job_id_of,
    model_id_of,
    model_of,
)
from pilotage.service.tinker_routes import LIVE, checkpoint_of, name_of
from pilotage.wire.core import CheckpointRecord, ErrorCode
from pilotage.wire.jobs import ACTIVE, CreateJobBody, JobStatus
from pilotage.wire.tinker import PROTOBUF, address_of

PREFIX = "/api/v1"
_KEY_PREFIX = "tml-"
_HOLD_S = 20.0
"""How long a request for a result is held; the SDK gives it 45 s."""
_POLL_S = 0.1
_CREATIONS = {"created": "create_model", "loaded": "load_weights"}
"""Futures of a model that comes to be, and the types of their results."""
_CALLS = {
    "forward_backward": "forward_backward",
    "forward": "forward_backward",
    "optim_step": "optim_step",
    "save_weights": "save_weights",
    "save_weights_for_sampler": "save_weights_for_sampler",
}
"""Calls of a model that its engine answers, and their names there."""


class TinkerFront:
    """Endpoints under /api/v1."""

    def __init__(
        self, jobs: Jobs, owner_of: Callable[[str | None], str], *, terms: TinkerTerms, shows_paths: bool
    ) -> None:
        """Args:
        owner_of: the owner of a token; raises for one that it does not know.
        shows_paths: name a model's directory as its tokenizer; for callers on this machine.
        """
        self._jobs = jobs
        self._owner_of = owner_of
        self._terms = terms
        self._shows_paths = shows_paths

    def routes(self) -> list[Route]:
        """Return the routes."""
        handlers: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "telemetry": self._telemetry,
        } | dict.fromkeys(_CALLS, self._call)
        return [
            *(Route(f"{PREFIX}/{name}", handler, methods=["POST"]) for name, handler in handlers.items()),
            Route(f"{PREFIX}/sessions/{{session_id}}/finish", self._finish, methods=["POST"]),
            Route(f"{PREFIX}/healthz", self._health),
            Route(f"{PREFIX}/get_server_capabilities", self._capabilities),
            Route(f"{PREFIX}/samplers/{{sampler_id}}", self._sampler),
            Route(f"{PREFIX}/training_runs/{{model_id}}/checkpoints", self._checkpoints),
            Route(
                f"{PREFIX}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}",
                self._delete_checkpoint,
                methods=["DELETE"],
            ),
        ]

    # --- who ---

    def _place(self, request: Request) -> Place:
        key = request.headers.get("x-api-key")
        owner = self._owner_of(None if key is None else key.removeprefix(_KEY_PREFIX))
        return Place(owner=owner, database="TINKER", schema="PUBLIC")

    def _model(self, request: Request, model_id: str) -> Job:
        return self._jobs.get(self._place(request), job_id_of(model_id))

    # --- sessions ---

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _config(self, request: Request) -> Response:
        self._place(request)
        return json_response({"pjwt_auth_enabled": False, "sample_use_retrieve_futures": False})

    async def _dynamic_config(self, request: Request) -> Response:
        self._place(request)
        return json_response({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        """Take what the SDK tells of its user, and keep nothing of it."""
        self._place(request)
        return json_response({"status": "accepted"})

    async def _capabilities(self, request: Request) -> Response:
        self._place(request)
        models = [
            {
                "model_name": name,
                "max_context_length": context_tokens(directory),
                "trainable": True,
                "sampleable": True,
            }
            for name, directory in self._jobs.models().items()
        ]
        return json_response({"supported_models": models})

    async def _create_session(self, request: Request) -> Response:
        self._place(request)
        await self._read(request, SessionBody)
        warning = None
        if not self._terms.adapts_unembed:
            warning = (
                "adapters leave the output projection as it is on this server, whatever train_unembed says"
            )
        reply = {"type": "create_session", "session_id": uuid.uuid4().hex, "warning_message": warning}
        return json_response(reply)

    async def _heartbeat(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, HeartbeatBody)
        for job in self._living(place, body.session_id):
            self._jobs.renew(job, LEASE_S)
        return json_response({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        """End a session's jobs: its caller says that it is done."""
        ending = self._living(self._place(request), request.path_params["session_id"])
        await asyncio.gather(*(self._jobs.cancel(job) for job in ending))
        return json_response({})

    def _living(self, place: Place, session_id: str) -> list[Job]:
        """Return the jobs of a session that have not ended."""
        jobs = self._jobs.list(place)
        return [job for job in jobs if job.id.startswith(f"{session_id}.") and job.status in ACTIVE]

    # --- models ---

    async def _create_model(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, CreateModelBody)
        model_id = model_id_of(body.session_id, "train", body.model_seq_id)
        wanted = self._body(body.base_model)
        if (lora := body.lora_config) is not None:
            adapter = adapter_asked(lora, adapts_unembed=self._terms.adapts_unembed)
            wanted = self._body(body.base_model, adapter=adapter, seed=lora.seed)
        self._ensure(place, model_id, wanted)
        return json_response({"request_id": f"{job_id_of(model_id)}:created", "model_id": model_id})

    async def _get_info(self, request: Request) -> Response:
        job = self._model(request, (await self._read(request, ModelBody)).model_id)
        name = job.body.model_name
        tokenizer = str(job.model_dir) if self._shows_paths else name
        return json_response(
            {
                "type": "get_info",
                "model_data": {"arch": "transformer", "model_name": name, "tokenizer_id": tokenizer},
                "model_id": model_of(job),
                "model_name": name,
                **adapter_info(job),
            }
        )

    async def _load_weights(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, RestoreBody)
        source_model, checkpoint_id = checkpoint_of(body.path)
        source = self._jobs.get(place, job_id_of(source_model))
        self._jobs.checkpoints_of(source).get(checkpoint_id)
        if body.model_id is not None:
            job = self._model(request, body.model_id)
            content = body.model_dump(include={"model_id", "seq_id", "path", "optimizer"})
            headers = {SOURCE_HEADER: str(self._jobs.directory_of(source))}
            operation = await self._sequenced(
                job, "load_weights", body.seq_id, orjson.dumps(content), headers
            )
            return json_response({"request_id": f"{job.id}:{operation}", "model_id": body.model_id})
        if body.session_id is None or body.model_seq_id is None:
            raise Refusal(ErrorCode.INVALID, "give model_id and seq_id, or session_id and model_seq_id")
        model_id = model_id_of(body.session_id, "train", body.model_seq_id)
        name = body.base_model or source.body.model_name
        checkpoint = {"checkpoint_id": checkpoint_id, "source_job_id": source.id}
        wanted = self._body(
            name, adapter=adapter_of(source), source=checkpoint, with_optimizer=body.optimizer
        )
        self._ensure(place, model_id, wanted)
        return json_response({"request_id": f"{job_id_of(model_id)}:loaded", "model_id": model_id})

    async def _weights_info(self, request: Request) -> Response:
        model_id, checkpoint_id = checkpoint_of((await self._read(request, WeightsBody)).tinker_path)
        job = self._model(request, model_id)
        self._jobs.checkpoints_of(job).get(checkpoint_id)
        return json_response({"base_model": job.body.model_name, **adapter_info(job)})

    async def _checkpoints(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        job = self._model(request, model_id)
        records = self._jobs.checkpoints_of(job).records()
        return json_response({"checkpoints": [_checkpoint(model_id, record) for record in records]})

    async def _delete_checkpoint(self, request: Request) -> Response:
        params = request.path_params
        model_id = params["model_id"]
        _, checkpoint_id = checkpoint_of(f"tinker://{model_id}/{params['kind']}/{params['name']}")
        self._jobs.checkpoints_of(self._model(request, model_id)).delete(checkpoint_id)
        return Response(status_code=204)

    # --- calls of a model ---

    async def _call(self, request: Request) -> Response:
        place, verb = self._place(request), _CALLS[request.url.path.rpartition("/")[2]]
        body = await read_bounded(request)
        kind = request.headers.get("content-type", "")
        if kind.startswith(PROTOBUF):
            model_id, sequence = await asyncio.to_thread(address_of, body)
        else:
            content = await asyncio.to_thread(json_object, body)
            model_id, sequence = str(content.get("model_id")), content.get("seq_id")
        job = self._jobs.get(place, job_id_of(model_id))
        operation = await self._sequenced(job, verb, sequence, body, {"content-type": kind})
        return json_response({"request_id": f"{job.id}:{operation}", "model_id": model_id})

    async def _sequenced(
        self, job: Job, verb: str, sequence: object, body: bytes, headers: Mapping[str, str]
    ) -> str:
        """Hand a call to the model's engine; returns the operation's id."""
        if type(sequence) is not int or not 0 < sequence < 2**62:
            raise Refusal(ErrorCode.INVALID, "a call of a model has seq_id 1, 2, ...", path="seq_id")
        reply = await self._ask(
            job, "POST", f"/tinker/{verb}", params={"sequence": sequence}, content=body, headers=headers
        )
        return orjson.loads(reply.content)["operation_id"]

    # --- sampling ---

    async def _create_sampling_session(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, SamplingSessionBody)
        model_id = model_id_of(body.session_id, "sample", body.sampling_session_seq_id)
        if body.model_path is None:
            if body.base_model is None:
                raise Refusal(ErrorCode.INVALID, "give model_path or base_model", path="base_model")
            self._ensure(place, model_id, self._body(body.base_model, trains=False))
            return _sampling_session(f"{job_id_of(model_id)}:{LIVE}:0")
        source_model, checkpoint_id = checkpoint_of(body.model_path)
        source = self._jobs.get(place, job_id_of(source_model))
        self._jobs.checkpoints_of(source).get(checkpoint_id)
        if source.status is JobStatus.RUNNING:
            reply = await self._ask(source, "GET", f"/tinker/generations/{checkpoint_id}")
            generation = orjson.loads(reply.content)["generation"]
            if generation is not None:
                name = f"{body.session_id}-{body.sampling_session_seq_id}"
                return _sampling_session(f"{source.id}:{generation}:{name}")
        checkpoint = {"checkpoint_id": checkpoint_id, "source_job_id": source.id}
        name = source.body.model_name
        wanted = self._body(name, adapter=adapter_of(source), source=checkpoint, trains=False)
        self._ensure(place, model_id, wanted)
        return _sampling_session(f"{job_id_of(model_id)}:{LIVE}:0")

    async def _sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        job = self._jobs.get(self._place(request), sampler_id.partition(":")[0])
        name = job.body.model_name
        return json_response({"sampler_id": sampler_id, "base_model": name})

    async def _sample(self, request: Request) -> Response:
        place, body = self._place(request), await read_bounded(request)
        session = str(json_object(body).get("sampling_session_id"))
        job = self._jobs.get(place, session.partition(":")[0])
        reply = orjson.loads((await self._ask(job, "POST", "/tinker/asample", content=body)).content)
        request_id = f"{job.id}:{reply['operation_id']}"
        sequence_ids = [f"{request_id}:{index}" for index in range(reply["num_samples"])]
        return json_response({"request_id": request_id, "sample_sequence_ids": sequence_ids})

    # --- futures ---

    async def _retrieve(self, request: Request) -> Response:
        place = self._place(request)
        request_id = (await self._read(request, FutureBody)).request_id
        job_id, _, operation = request_id.rpartition(":")
        job = self._jobs.get(place, job_id)
        if operation in _CREATIONS:
            return await self._creation(job, request_id, _CREATIONS[operation])
        try:
            reply = await self._ask(
                job,
                "GET",
                f"/tinker/results/{operation}",
                params={"wait_s": _HOLD_S},
                headers={"accept": request.headers.get("accept", "")},
            )
        except Refusal as refusal:
            if refusal.body.code != ErrorCode.ENGINE_LOST:
                raise
            return json_response({"error": refusal.body.message, "category": "server"})
        if reply.status_code == 202:
            return _try_again(request_id, "active")
        return Response(reply.content, media_type=reply.headers["content-type"])

    async def _creation(self, job: Job, request_id: str, kind: str) -> Response:
        """Answer whether a model is there."""
        deadline = asyncio.get_running_loop().time() + _HOLD_S
        while job.status in ACTIVE and job.status is not JobStatus.RUNNING:
            if asyncio.get_running_loop().time() > deadline:
                is_waiting = job.status is JobStatus.PENDING
                return _try_again(request_id, "paused_capacity" if is_waiting else "active")
            await asyncio.sleep(_POLL_S)
        if job.status is not JobStatus.RUNNING:
            error = f"the model's job is {job.status}: {job.reason or 'no reason given'}"
            return json_response({"error": error, "category": "server"})
        return json_response({"type": kind, "model_id": model_of(job)})

    async def _cancel(self, request: Request) -> Response:
        place = self._place(request)
        job_id, _, operation = (await self._read(request, FutureBody)).request_id.rpartition(":")
        await self._ask(self._jobs.get(place, job_id), "POST", f"/tinker/cancel/{operation}")
        return json_response({})

    # --- parts ---

    async def _read[T: BaseModel](self, request: Request, body_type: type[T]) -> T:
        return parse(body_type, await read_bounded(request))

    def _ensure(self, place: Place, model_id: str, body: CreateJobBody) -> None:
        """Create the job of a name, unless there is one: a call that is repeated makes no second."""
        job_id = job_id_of(model_id)
        try:
            self._jobs.get(place, job_id)
        except Refusal:
            self._jobs.create(place, body.model_copy(update={"job_id": job_id}))

    def _body(self, name: str, **options: Any) -> CreateJobBody:
        return job_body(self._jobs.models(), self._terms, name, **options)

    async def _ask(self, job: Job, method: str, path: str, **options: Any) -> httpx.Response:
        """Call a job's engine.

        Raises:
            Refusal: it refused, or cannot be asked now; a job that is not running yet is 429, which the SDK
                waits out.
        """
        try:
            engine = self._jobs.running_engine(job)
        except Refusal as refusal:
            if refusal.body.code == ErrorCode.JOB_NOT_RUNNING:
                refusal.status = 429
            raise
        self._jobs.touch(job)
        try:
            reply = await engine.http.request(method, path, **options)
        except httpx.HTTPError as error:
            message = f"the job's engine does not answer ({type(error).__name__}); ask again"
            raise Refusal(ErrorCode.UNAVAILABLE, message, retryable=True) from None
        if reply.status_code >= 400:
            body = orjson.loads(reply.content)
            details = {name: body[name] for name in ("path", "retryable") if name in body}
            raise Refusal(body["code"], body["message"], status=reply.status_code, **details)
        return reply


def _sampling_session(session_id: str) -> Response:
    return json_response({"type": "create_sampling_session", "sampling_session_id": session_id})


def _try_again(request_id: str, state: str) -> Response:
    return json_response({"type": "try_again", "request_id": request_id, "queue_state": state})


def _checkpoint(model_id: str, record: CheckpointRecord) -> dict[str, Any]:
    name = name_of(record.checkpoint_id)
    return {
        "checkpoint_id": name,
        "checkpoint_type": "sampler" if name.startswith("sampler_weights/") else "training",
        "time": record.created_at,
        "tinker_path": f"tinker://{model_id}/{name}",
        "size_bytes": record.size_bytes,
    }
