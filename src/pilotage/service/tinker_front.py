"""The Tinker wire, as the front answers it: sessions, models and sampling clients become jobs.

    model S:train:N      the job S.train.N, one trainer and one sampler (`TinkerSizes` says how large)
    weights by path, or a base model, to sample from: the job of these weights where its sampler has them, or
                         else a job S.sample.N of one sampler
    sampling client      JOB:VERSION of the weights, or JOB:live
    future               JOB:OPERATION, or JOB:created

Names say where things are, so that nothing about a session is kept here and a front that was killed and
started again knows them all. A session is kept alive by the SDK's heartbeats: they renew the leases of its
jobs, which end without them.

Owners have their own jobs here as on the Cortex wire. The SDK wants keys that start with `tml-`: a token
with that before it.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.service.bodies import json_object, parse
from pilotage.service.core_routes import SOURCE_HEADER
from pilotage.service.forwarding import read_bounded
from pilotage.service.jobs import Job, Jobs, Place
from pilotage.service.refusals import Refusal, json_response
from pilotage.service.tinker_routes import LIVE, checkpoint_of
from pilotage.wire.core import CheckpointRecord, ErrorCode
from pilotage.wire.jobs import ACTIVE, CreateJobBody, JobStatus
from pilotage.wire.tinker import PROTOBUF, address_of

PREFIX = "/api/v1"
_KEY_PREFIX = "tml-"
_SESSION = re.compile(r"[A-Za-z0-9-]{1,64}")
_MODEL = re.compile(r"([A-Za-z0-9-]{1,64}):(train|sample):([0-9]{1,9})")
_LEASE_S = 180.0
"""The SDK sends a heartbeat every 10 s, and warns its user after two minutes without one."""
_HOLD_S = 20.0
"""How long a request for a result is held; the SDK gives it 45 s."""
_POLL_S = 0.1
_CREATIONS = {"created": "create_model", "loaded": "load_weights"}
"""Futures of a model that comes to be, and the types of their results."""
_MAX_CONTEXT_TOKENS = 32_768
_CALLS = {
    "forward_backward": "forward_backward",
    "forward": "forward_backward",
    "optim_step": "optim_step",
    "save_weights": "save_weights",
    "save_weights_for_sampler": "save_weights_for_sampler",
}
"""Calls of a model that its engine answers, and their names there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSizes:
    """GPUs of a model's trainer and of a sampler; Tinker's callers cannot say."""

    training: int = 1
    sampling: int = 1


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    type: str | None = None


class SessionBody(_Body):
    """Opens a session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(_Body):
    """Keeps a session's jobs."""

    session_id: str


class _AdamChoice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = Field(default="adamw", pattern="^adamw$")


class CreateModelBody(_Body):
    """Makes a model to train. `lora_config` asks for an adapter."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: dict[str, Any] | None = None
    optimizer_config: _AdamChoice = _AdamChoice()


class RestoreBody(_Body):
    """Restores a checkpoint: in an open model (`model_id`), or in one that it makes (`session_id`)."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: _AdamChoice | None = None
    weights_access_token: None = None


class SamplingSessionBody(_Body):
    """Makes a sampling client of saved weights, or of a base model."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str | None = None
    model_path: str | None = None


class ModelBody(_Body):
    """Asks about a model."""

    model_id: str


class WeightsBody(_Body):
    """Asks about saved weights."""

    tinker_path: str
    weights_access_token: None = None


class FutureBody(_Body):
    """Asks for the result of a request, or to cancel it."""

    request_id: str
    allow_metadata_only: bool = False
    model_id: str | None = None


class TinkerFront:
    """Endpoints under /api/v1."""

    def __init__(
        self, jobs: Jobs, owner_of: Callable[[str | None], str], *, sizes: TinkerSizes, shows_paths: bool
    ) -> None:
        """Args:
        owner_of: the owner of a token; raises for one that it does not know.
        shows_paths: name a model's directory as its tokenizer; for callers on this machine.
        """
        self._jobs = jobs
        self._owner_of = owner_of
        self._sizes = sizes
        self._shows_paths = shows_paths

    def routes(self) -> list[Route]:
        """Return the routes."""
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
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
            Route(f"{PREFIX}/healthz", self._health),
            Route(f"{PREFIX}/get_server_capabilities", self._capabilities),
            Route(f"{PREFIX}/sessions/{{session_id}}/finish", self._finish, methods=["POST"]),
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
        return self._jobs.get(self._place(request), _job_id(model_id))

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
                "max_context_length": _context_tokens(directory),
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
        if not self._jobs.trains_adapters:
            warning = "this server trains all weights of a model; the rank of a lora_config is not used"
        reply = {"type": "create_session", "session_id": uuid.uuid4().hex, "warning_message": warning}
        return json_response(reply)

    async def _heartbeat(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, HeartbeatBody)
        for job in self._jobs.list(place):
            if job.id.startswith(f"{body.session_id}.") and job.status in ACTIVE:
                self._jobs.renew(job, _LEASE_S)
        return json_response({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        """End a session: its jobs are cancelled now, and not when their leases have run out."""
        place, session_id = self._place(request), request.path_params["session_id"]
        for job in self._jobs.list(place):
            if job.id.startswith(f"{session_id}.") and job.status in ACTIVE:
                await self._jobs.cancel(job)
        return Response(status_code=204)

    # --- models ---

    async def _create_model(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, CreateModelBody)
        model_id = _model_id(body.session_id, "train", body.model_seq_id)
        adapter = _adapter(body.lora_config) if self._jobs.trains_adapters and body.lora_config else None
        self._ensure(place, model_id, self._job_body(body.base_model, adapter=adapter))
        return json_response({"request_id": f"{_job_id(model_id)}:created", "model_id": model_id})

    async def _get_info(self, request: Request) -> Response:
        job = self._model(request, (await self._read(request, ModelBody)).model_id)
        name = job.body.sub_job_configs[0].model_name
        tokenizer = str(job.model_dir) if self._shows_paths else name
        return json_response(
            {
                "type": "get_info",
                "model_data": {"arch": "transformer", "model_name": name, "tokenizer_id": tokenizer},
                "model_id": _model_of(job),
                "model_name": name,
                **_adapter_info(job),
            }
        )

    async def _load_weights(self, request: Request) -> Response:
        place, body = self._place(request), await self._read(request, RestoreBody)
        source_model, checkpoint_id = checkpoint_of(body.path)
        source = self._jobs.get(place, _job_id(source_model))
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
        model_id = _model_id(body.session_id, "train", body.model_seq_id)
        name = body.base_model or source.body.sub_job_configs[0].model_name
        checkpoint = {"checkpoint_id": checkpoint_id, "source_job_id": source.id}
        wanted = self._job_body(
            name, adapter=_adapter_of(source), source=checkpoint, with_optimizer=body.optimizer
        )
        self._ensure(place, model_id, wanted)
        return json_response({"request_id": f"{_job_id(model_id)}:loaded", "model_id": model_id})

    async def _weights_info(self, request: Request) -> Response:
        model_id, checkpoint_id = checkpoint_of((await self._read(request, WeightsBody)).tinker_path)
        job = self._model(request, model_id)
        self._jobs.checkpoints_of(job).get(checkpoint_id)
        return json_response({"base_model": job.body.sub_job_configs[0].model_name, **_adapter_info(job)})

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
        job = self._jobs.get(place, _job_id(model_id))
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
        model_id = _model_id(body.session_id, "sample", body.sampling_session_seq_id)
        if body.model_path is None:
            if body.base_model is None:
                raise Refusal(ErrorCode.INVALID, "give model_path or base_model", path="base_model")
            self._ensure(place, model_id, self._job_body(body.base_model, trains=False))
            return _sampling_session(_job_id(model_id), LIVE)
        source_model, checkpoint_id = checkpoint_of(body.model_path)
        source = self._jobs.get(place, _job_id(source_model))
        record = self._jobs.checkpoints_of(source).get(checkpoint_id)
        if source.status is JobStatus.RUNNING:
            state = orjson.loads((await self._ask(source, "GET", "/core")).content)
            if state["weights_version"] == record.weights_version and checkpoint_id.startswith("sampler-"):
                return _sampling_session(source.id, str(record.weights_version))
        checkpoint = {"checkpoint_id": checkpoint_id, "source_job_id": source.id}
        name = source.body.sub_job_configs[0].model_name
        wanted = self._job_body(name, adapter=_adapter_of(source), source=checkpoint, trains=False)
        self._ensure(place, model_id, wanted)
        return _sampling_session(_job_id(model_id), LIVE)

    async def _sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        job = self._jobs.get(self._place(request), sampler_id.rpartition(":")[0])
        name = job.body.sub_job_configs[0].model_name
        return json_response({"sampler_id": sampler_id, "base_model": name})

    async def _sample(self, request: Request) -> Response:
        place, body = self._place(request), await read_bounded(request)
        session = str(json_object(body).get("sampling_session_id"))
        job = self._jobs.get(place, session.rpartition(":")[0])
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
        return json_response({"type": kind, "model_id": _model_of(job)})

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
        job_id = _job_id(model_id)
        try:
            self._jobs.get(place, job_id)
        except Refusal:
            self._jobs.create(place, body.model_copy(update={"job_id": job_id}))

    def _job_body(
        self,
        name: str,
        *,
        adapter: Mapping[str, Any] | None = None,
        source: Mapping[str, str] | None = None,
        trains: bool = True,
        with_optimizer: bool = True,
    ) -> CreateJobBody:
        models = self._jobs.models()
        if name not in models:
            known = ", ".join(models) or "none"
            raise Refusal(
                ErrorCode.NOT_FOUND, f"no model {name!r} here; there are {known}", path="base_model"
            )
        shared = {"max_seq_len": _context_tokens(models[name]), "peft_config": adapter}
        training = {
            "optimizer": {"lr": 0.0},
            "train_batch_size": 1,
            "n_gpus": self._sizes.training,
            "load_optimizer_states": with_optimizer,
        }
        parts: list[dict[str, Any]] = [
            {"job_type": "sampling", "inference_config": {"n_gpus": self._sizes.sampling} | shared}
        ]
        if trains:
            parts.insert(0, {"job_type": "training", "training_config": training | shared})
        same = {"model_name": name, "source_checkpoint_info": source}
        content = {
            "sub_job_configs": [part | same for part in parts],
            "comment": "tinker",
            "x-pilotage": {"lease_s": _LEASE_S},
        }
        return CreateJobBody.model_validate(content)

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


def _model_id(session_id: str, kind: str, number: int) -> str:
    if not _SESSION.fullmatch(session_id):
        raise Refusal(ErrorCode.INVALID, "that is no session id", path="session_id")
    return f"{session_id}:{kind}:{number}"


def _job_id(model_id: str) -> str:
    """Return the id of a model's job.

    Raises:
        Refusal: that is no model's id.
    """
    if not _MODEL.fullmatch(model_id):
        raise Refusal(ErrorCode.NOT_FOUND, f"no model {model_id[:200]!r} here", path="model_id")
    return model_id.replace(":", ".")


def _model_of(job: Job) -> str:
    return job.id.replace(".", ":")


def _sampling_session(job_id: str, version: str) -> Response:
    return json_response({"type": "create_sampling_session", "sampling_session_id": f"{job_id}:{version}"})


def _try_again(request_id: str, state: str) -> Response:
    return json_response({"type": "try_again", "request_id": request_id, "queue_state": state})


def _checkpoint(model_id: str, record: CheckpointRecord) -> dict[str, Any]:
    is_sampler = record.checkpoint_id.startswith("sampler-")
    name = f"sampler_weights/{record.checkpoint_id[8:]}" if is_sampler else f"weights/{record.checkpoint_id}"
    return {
        "checkpoint_id": name,
        "checkpoint_type": "sampler" if is_sampler else "training",
        "time": record.created_at,
        "tinker_path": f"tinker://{model_id}/{name}",
        "size_bytes": record.size_bytes,
    }


def _adapter(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter that a lora_config asks for."""
    rank = lora.get("rank")
    if type(rank) is not int or not 1 <= rank <= 4096:
        raise Refusal(ErrorCode.INVALID, "a rank is 1 to 4096", path="lora_config.rank")
    if not (lora.get("train_mlp", True) and lora.get("train_attn", True)) or lora.get("seed") is not None:
        raise Refusal(
            ErrorCode.INVALID,
            "adapters are put into all linear layers, from a seed of the server's",
            path="lora_config",
        )
    return {"peft_type": "Lora", "target_modules": "all-linear", "r": rank, "lora_alpha": 32}


def _adapter_of(job: Job) -> dict[str, Any] | None:
    return None if job.body.adapter is None else job.body.adapter.model_dump(mode="json")


def _adapter_info(job: Job) -> dict[str, Any]:
    adapter = job.body.adapter
    return {"is_lora": adapter is not None, "lora_rank": None if adapter is None else adapter.r}


def _context_tokens(model_dir: Path) -> int:
    """Return the longest context of a model's jobs: its own, within a bound."""
    config = orjson.loads((model_dir / "config.json").read_bytes())
    return min(int(config.get("max_position_embeddings", _MAX_CONTEXT_TOKENS)), _MAX_CONTEXT_TOKENS)
