"""The smallest service with a strict core: one job, weights that are one number, everything in memory.

`gradient += sum of advantages` and `weight -= learning rate * gradient`, so that a call carried out twice, or
not at all, is seen in the weight.
"""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pilotage.types import (
    AdamParams,
    Completion,
    FinishReason,
    ForwardBackwardResult,
    StepResult,
)
from pilotage.wire.core import HTTP_STATUS, OCTET_STREAM, Capabilities, CheckpointRecord, ErrorCode
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.records import pack_result, record_from_json, record_to_json
from pilotage.wire.samples import (
    pack_completion,
    pack_logprobs,
    unpack_forward_request,
    unpack_sample_request,
    unpack_samples,
)

PREFIX = "/api/v2/databases/CORTEX_TRAINING_DB/schemas/PUBLIC/cortex-training"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: ErrorCode, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.more = more

    def response(self) -> Response:
        body = {"code": self.code, "message": str(self), **self.more}
        return JSONResponse(body, HTTP_STATUS[self.code])


class TinyCore:
    """One service. Its attributes are read and set by tests."""

    def __init__(self, *, max_request_bytes: int = 2**20, max_response_bytes: int = 2**20) -> None:
        self.capabilities = Capabilities(
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            max_wait_s=0.05,
            min_lease_s=0.05,
            losses=("grpo", "gspo", "cispo", "cross_entropy"),
            reductions=("token_mean", "sequence_mean", "dr_grpo"),
        )
        self.weight, self.gradient, self.num_backwards, self.steps = 1.0, 0.0, 0, 0
        self.weights_version = 0
        self.status = "pending"
        self.polls_until_running = 0
        self.reason: str | None = None
        self.jobs: dict[str, dict[str, Any]] = {}
        self.leases: list[float] = []
        self.saved: dict[str, tuple[float, CheckpointRecord]] = {}
        self.token: str | None = None
        self.files: dict[str, bytes] = {}
        self.executed: list[str] = []
        self.has_started = asyncio.Event()
        self.cancelled: list[str] = []
        self.piece_bytes: list[int] = []
        self.sampling_s = 0.0
        self.fails_next: Refused | None = None
        self.fails_next_after: tuple[int, Refused] | None = None
        self.log = ["INFO engine: opened", "ERROR engine: out of memory"]
        self._outcomes: dict[str, tuple[bytes, asyncio.Future[Response]]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._sequences: dict[int, str] = {}
        self._turn = asyncio.Condition()
        self._next_to_run = 1
        self.app = Starlette(
            routes=[
                Route(f"{PREFIX}/capabilities", self._capabilities),
                Route(PREFIX, self._create, methods=["POST"]),
                Route(PREFIX, self._list, methods=["GET"]),
                Route(f"{PREFIX}/capacity", self._capacity),
                Route(f"{PREFIX}/{{job}}:cancel", self._cancel, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/checkpoints", self._checkpoints),
                Route(f"{PREFIX}/{{job}}/checkpoints/{{id}}:export", self._export, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/files/{{name}}", self._file),
                Route(f"{PREFIX}/{{job}}/core/metrics", self._metrics),
                Route(f"{PREFIX}/{{job}}/operation", self._operation, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/core", self._state),
                Route(f"{PREFIX}/{{job}}/core/lease", self._lease, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/core/operations/{{id}}", self._outcome),
                Route(f"{PREFIX}/{{job}}/core/{{verb}}", self._call, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}", self._get),
            ],
            exception_handlers={Refused: self._refused},
        )

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return error.response()

    # --- jobs ---

    async def _capabilities(self, request: Request) -> Response:
        return JSONResponse(self.capabilities.model_dump())

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        job_id = body["job_id"]
        if job_id in self.jobs:
            raise Refused(ErrorCode.CONFLICT, f"job id {job_id} is taken")
        self.jobs[job_id] = body
        if self.status == "cancelled":  # the state of the newest job
            self.status = "pending"
        return JSONResponse({"job_id": job_id})

    def _record(self, job_id: str) -> dict[str, Any]:
        if job_id not in self.jobs:
            raise Refused(ErrorCode.NOT_FOUND, f"no job {job_id} here")
        return {
            "job_id": job_id,
            "status": self.status,
            "reason": self.reason,
            "created_at": "2026-01-01T00:00:00Z",
            "updated_at": "2026-01-01T00:00:00Z",
            "comment": self.jobs[job_id].get("comment"),
        }

    async def _get(self, request: Request) -> Response:
        record = self._record(request.path_params["job"])
        if self.status == "pending":
            self.polls_until_running -= 1
            if self.polls_until_running < 0:
                self.status = "running"
                record["status"] = "running"
        return JSONResponse(record)

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"jobs": [self._record(job_id) for job_id in self.jobs]})

    async def _cancel(self, request: Request) -> Response:
        self._record(request.path_params["job"])
        if self.status in ("failed", "terminated"):
            raise Refused(ErrorCode.CONFLICT, f"the job has ended: {self.status}")
        self.status = "cancelled"
        return Response()

    async def _lease(self, request: Request) -> Response:
        self._record(request.path_params["job"])
        body = await request.json()
        self.leases.append(body["lease_s"])
        return JSONResponse({"expires_in_s": body["lease_s"], "status": self.status})

    async def _operation(self, request: Request) -> Response:
        body = await request.json()
        if body["operation_type"] == "tail-logs":
            entries = [{"_raw": line} for line in self.log]
            return JSONResponse({"entries": entries, "next_cursor": "2", "eof": True})
        assert body["operation_type"] == "cancel-request"
        operation_id = body["payload"]["request_id"]
        self.cancelled.append(operation_id)
        if operation_id in self._running:
            self._running[operation_id].cancel()
        return JSONResponse({"cancelled": True})

    async def _capacity(self, request: Request) -> Response:
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise Refused(ErrorCode.UNAUTHENTICATED, "give a valid token")
        return JSONResponse({"max_total_gpus": 8, "in_use_gpus": 2, "available_gpus": 6})

    async def _checkpoints(self, request: Request) -> Response:
        self._record(request.path_params["job"])
        return JSONResponse({"checkpoints": [record.model_dump() for _, record in self.saved.values()]})

    async def _export(self, request: Request) -> Response:
        base = str(request.url).split("/checkpoints/")[0]
        files = [
            {"filename": name, "url": f"{base}/files/{name}", "size_bytes": len(content)}
            for name, content in self.files.items()
        ]
        return JSONResponse({"checkpoint_id": request.path_params["id"], "files": files})

    async def _file(self, request: Request) -> Response:
        return Response(self.files[request.path_params["name"]])

    async def _metrics(self, request: Request) -> Response:
        cursor = int(request.query_params["cursor"])
        records = [
            {"cursor": i, "at": 1.0, "verb": "step", "duration_s": 0.5, "values": {"grad_norm": float(i)}}
            for i in range(cursor, min(cursor + 2, 3))
        ]
        return JSONResponse({"records": records, "next_cursor": cursor + len(records)})

    # --- the core ---

    async def _state(self, request: Request) -> Response:
        self._require_running()
        state = {
            "next_sequence": len(self._sequences) + 1,
            "weights_version": self.weights_version,
            "max_context_tokens": 64,
        }
        return JSONResponse(state)

    def _require_running(self) -> None:
        if self.status != "running":
            raise Refused(ErrorCode.ENGINE_LOST, f"the job is {self.status}", log_tail=self.log)

    async def _call(self, request: Request) -> Response:
        self._require_running()
        verb, body = request.path_params["verb"], await request.body()
        operation_id, sequence = request.query_params["operation_id"], request.query_params.get("sequence")
        digest = sha256(verb.encode() + body).digest()
        if operation_id not in self._outcomes:
            number = None if sequence is None else int(sequence)
            if number is not None and self._sequences.setdefault(number, operation_id) != operation_id:
                raise Refused(ErrorCode.CONFLICT, f"sequence {number} was used by another operation")
            self._outcomes[operation_id] = digest, asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(operation_id, number, verb, body))
            self._running[operation_id] = task
        if self._outcomes[operation_id][0] != digest:
            raise Refused(ErrorCode.CONFLICT, f"operation {operation_id} was used for other bytes")
        return await self._wait(operation_id, float(request.query_params["wait_s"]))

    async def _outcome(self, request: Request) -> Response:
        self._require_running()
        operation_id = request.path_params["id"]
        if operation_id not in self._outcomes:
            raise Refused(ErrorCode.NOT_FOUND, "no operation of that id")
        return await self._wait(operation_id, float(request.query_params["wait_s"]))

    async def _wait(self, operation_id: str, wait_s: float) -> Response:
        future = self._outcomes[operation_id][1]
        try:
            return await asyncio.wait_for(asyncio.shield(future), wait_s)
        except TimeoutError:
            return JSONResponse({"operation_id": operation_id, "status": "running"}, 202)

    async def _run(self, operation_id: str, number: int | None, verb: str, body: bytes) -> None:
        future = self._outcomes[operation_id][1]
        async with self._turn:
            await self._turn.wait_for(lambda: number in (None, self._next_to_run))
        try:
            self.executed.append(verb)
            self.has_started.set()
            if self.fails_next_after is not None:
                left, refused = self.fails_next_after
                self.fails_next_after = None if left == 0 else (left - 1, refused)
                if left == 0:
                    raise refused
            if self.fails_next is not None:
                refused, self.fails_next = self.fails_next, None
                raise refused
            verbs: dict[str, Callable[[bytes], Awaitable[Response]]] = {
                "forward_backward": self._forward_backward,
                "step": self._step,
                "discard": self._discard,
                "publish": self._publish,
                "save": self._save,
                "load": self._load,
                "sample": self._sample,
                "forward": self._forward,
            }
            future.set_result(await verbs[verb](body))
        except Refused as refused:
            future.set_result(refused.response())
        except asyncio.CancelledError:
            future.set_result(Refused(ErrorCode.CONFLICT, "the operation was cancelled").response())
        finally:
            del self._running[operation_id]
            async with self._turn:
                if number is not None:
                    self._next_to_run = number + 1
                self._turn.notify_all()

    # --- verbs ---

    async def _forward_backward(self, body: bytes) -> Response:
        samples, _, denominators = unpack_samples(decode_frame(body))
        assert denominators is not None
        advantages = sum(float(sample.advantages.sum()) for sample in samples)
        self.gradient += advantages / denominators.num_sequences
        self.num_backwards += 1
        self.piece_bytes.append(len(body))
        result = ForwardBackwardResult(
            loss=-advantages / denominators.num_sequences,
            trained_tokens=sum(sample.trained_tokens for sample in samples),
            forwarded_tokens=sum(sample.token_ids.size for sample in samples),
            num_sequences=len({sample.sequence_id for sample in samples}),
            logprob_gap_mean=0.25,
            logprob_gap_max=float(len(samples)),
            gap_k3=0.5,
            clip_fraction=0.0,
            trainer_logprobs_n=np.concatenate([s.sampler_logprobs[s.loss_mask] for s in samples]),
        )
        return Response(encode_frame(pack_result(result)), media_type=OCTET_STREAM)

    async def _step(self, body: bytes) -> Response:
        params = record_from_json(AdamParams, body)
        if not self.num_backwards:
            raise Refused(ErrorCode.TRAINER_ERROR, "nothing was accumulated")
        self.weight -= params.learning_rate * self.gradient
        result = StepResult(
            grad_norm=abs(self.gradient), learning_rate=params.learning_rate, num_backwards=self.num_backwards
        )
        self.gradient, self.num_backwards = 0.0, 0
        self.steps += 1
        return Response(record_to_json(result), media_type="application/json")

    async def _discard(self, body: bytes) -> Response:
        self.gradient, self.num_backwards = 0.0, 0
        return JSONResponse({})

    async def _publish(self, body: bytes) -> Response:
        self.weights_version += 1
        return JSONResponse({"weights_version": self.weights_version})

    async def _save(self, body: bytes) -> Response:
        checkpoint_id = json.loads(body)["checkpoint_id"]
        record = CheckpointRecord(
            checkpoint_id=checkpoint_id,
            checkpoint_type="resumable",
            global_steps=self.steps,
            weights_version=self.weights_version,
            created_at="2026-01-01T00:00:00Z",
            size_bytes=8,
            sha256=sha256(str(self.weight).encode()).hexdigest(),
        )
        self.saved[checkpoint_id] = self.weight, record
        return Response(record.model_dump_json(), media_type="application/json")

    async def _load(self, body: bytes) -> Response:
        checkpoint_id = json.loads(body)["checkpoint_id"]
        if checkpoint_id not in self.saved:
            raise Refused(ErrorCode.NOT_FOUND, f"no checkpoint {checkpoint_id}; list them first")
        self.weight, record = self.saved[checkpoint_id]
        self.gradient, self.num_backwards = 0.0, 0
        return Response(record.model_dump_json(), media_type="application/json")

    async def _sample(self, body: bytes) -> Response:
        wanted = unpack_sample_request(decode_frame(body))
        await asyncio.sleep(self.sampling_s)
        count = wanted.params.max_tokens
        completion = Completion(
            token_ids=np.full(count, wanted.turn_index, np.int32),
            logprobs=np.full(count, -0.5, np.float32),
            weights_versions=np.full(count, self.weights_version, np.int32),
            finish_reason=FinishReason.LENGTH,
        )
        return Response(encode_frame(pack_completion(completion)), media_type=OCTET_STREAM)

    async def _forward(self, body: bytes) -> Response:
        samples, temperature = unpack_forward_request(decode_frame(body))
        found = [np.where(s.loss_mask, -s.token_ids / temperature, 0).astype(np.float32) for s in samples]
        self.piece_bytes.append(len(body))
        return Response(encode_frame(pack_logprobs(found)), media_type=OCTET_STREAM)


def adam(learning_rate: float = 0.5) -> AdamParams:
    """Return Adam parameters."""
    return dataclasses.replace(AdamParams(), learning_rate=learning_rate)
