"""The data plane of the Cortex Training wire, as the engine process answers it.

Every call is translated to an operation of the core; its request id is the operation's id. What the wire
leaves open is closed here: gradients accumulate until step; a second step finds no gradient and fails
instead of applying the first once more.
"""

import asyncio
import base64
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.algorithms import aligned
from pilotage.service.bodies import json_object, parse
from pilotage.service.chunk_groups import ChunkGroups
from pilotage.service.core_routes import SOURCE_HEADER
from pilotage.service.engine_host import EngineHost, figures, json_reply
from pilotage.service.generation import error_event, generate, read_wishes
from pilotage.service.operations import Operation, Reply, Work
from pilotage.service.refusals import Refusal, invalid, json_response
from pilotage.service.stock_requests import Stream, describe
from pilotage.wire.core import (
    OCTET_STREAM,
    OPERATION_ID_PATTERN,
    Closed,
    ErrorCode,
    LoadBody,
    SaveBody,
)
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.grpo import from_stock, read_rows
from pilotage.wire.jobs import sub_job_ids
from pilotage.wire.rows import to_rows


class StepBody(Closed):
    """The stock step: only the learning rate can be given."""

    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class StockSaveBody(Closed):
    """The stock save. The keys of on-premise servers are taken where they ask for nothing."""

    path: None = None
    step: None = None
    export_hf: Literal[False] = False
    save_total_limit: None = None
    stage_info: None = None
    checkpoint_type: Literal["resumable", "weights-only"] = "resumable"
    checkpoint_id: str | None = Field(default=None, pattern=OPERATION_ID_PATTERN)


class StockLoadBody(Closed):
    """The stock load."""

    checkpoint_id: str = Field(pattern=OPERATION_ID_PATTERN)
    source_job_id: str | None = None
    target_sub_job_id: str | None = None


class WeightSyncBody(Closed):
    """Payload of weight-sync."""

    source_sub_job_id: str
    target_sub_job_ids: tuple[str, ...] = Field(min_length=1)
    weight_format: Literal["vllm", "hf", "lora"] | None = None
    bucket_size: int | None = Field(default=None, gt=0)


class OperationBody(Closed):
    """The generic envelope."""

    operation_type: str
    sub_job_id: str | None = None
    sub_job_type: str | None = None
    payload: dict[str, Any] | None = None


class StockRoutes:
    """Endpoints of the data plane."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._groups = ChunkGroups()
        self._streams: dict[str, Stream] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/forward-backward", self._forward_backward, methods=["POST"]),
            Route("/step", self._step, methods=["POST"]),
            Route("/save", self._save, methods=["POST"]),
            Route("/load", self._load, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/generate-stream", self._generate_stream, methods=["POST"]),
            Route("/operation", self._operation, methods=["POST"]),
            Route("/requests/{request_id}", self._request, methods=["GET"]),
        ]

    # --- trainer ---

    async def _forward_backward(self, request: Request) -> Response:
        body = await request.body()
        received = self._groups.receive(body, operation="fwd-bwd")
        request_id = _request_id(received.group_id)
        if received.is_repeat:
            return self._accepted(request_id)
        if received.frame is None:
            return json_response({"job_id": self._host.spec.job_id, "chunk_group_id": received.group_id})
        frame = received.frame

        async def work() -> Reply:
            batch = await asyncio.to_thread(lambda: from_stock(decode_frame(frame)))
            result = await self._host.forward_backward(batch.samples, batch.loss, batch.denominators)
            reply: dict[str, Any] = {
                "job_id": self._host.spec.job_id,
                "avg_loss": result.loss if math.isfinite(result.loss) else None,
                "metrics": _stock_metrics(result),
                "post_process_outputs": {},
            }
            if not batch.wants_logprobs:
                return Reply(content=orjson.dumps(reply), values=figures(result))
            assert result.trainer_logprobs_n is not None  # every engine says
            logprobs = aligned(batch.samples, result.trainer_logprobs_n)
            reply["post_process_outputs"] = {"logprobs": to_rows(batch.layout, logprobs)}
            return Reply(content=encode_frame(reply), media_type=OCTET_STREAM, values=figures(result))

        try:
            operation = await self._submit("forward-backward", work, request_id, frame)
        except Refusal:
            self._groups.forget(received.group_id)
            raise
        return self._accepted(operation.id)

    async def _step(self, request: Request) -> Response:
        body = parse(StepBody, raw := await request.body())
        params = self._host.adam_defaults
        if body.learning_rate is not None:
            params = replace(params, learning_rate=body.learning_rate)

        async def work() -> Reply:
            result = await self._host.step(params)
            reply = {
                "global_steps": self._host.global_steps,
                "last_lr": result.learning_rate,
                "metrics": {"grad_norm": result.grad_norm, "num_backwards": result.num_backwards},
            }
            return Reply(content=orjson.dumps(reply), values=figures(result))

        return self._accepted((await self._submit("step", work, _request_id(None), raw)).id)

    async def _save(self, request: Request) -> Response:
        body = parse(StockSaveBody, raw := await request.body())
        checkpoint_id = body.checkpoint_id or f"cp_{uuid.uuid4().hex}"
        wanted = SaveBody(checkpoint_id=checkpoint_id, weights_only=body.checkpoint_type == "weights-only")

        async def work() -> Reply:
            return json_reply((await self._host.save(wanted)).model_dump_json())

        return self._accepted((await self._submit("save", work, _request_id(None), raw)).id)

    async def _load(self, request: Request) -> Response:
        body = parse(StockLoadBody, raw := await request.body())
        source = Path(request.headers.get(SOURCE_HEADER, str(self._host.spec.directory)))
        if body.target_sub_job_id is not None:
            self._require_trainer_id(body.target_sub_job_id, "target_sub_job_id")
        wanted = LoadBody(checkpoint_id=body.checkpoint_id, source_job_id=body.source_job_id)

        async def work() -> Reply:
            return json_reply((await self._host.load(wanted, source)).model_dump_json())

        return self._accepted((await self._submit("load", work, _request_id(None), raw)).id)

    # --- sampler ---

    async def _generate(self, request: Request) -> Response:
        received = self._groups.receive(await request.body(), operation="generate")
        request_id = _request_id(received.group_id)
        if received.is_repeat:
            return self._accepted(request_id)
        if received.frame is None:
            return json_response({"job_id": self._host.spec.job_id, "chunk_group_id": received.group_id})
        wishes = read_wishes(decode_frame(received.frame), self._host)

        async def work() -> Reply:
            results: list[Any] = [None] * len(wishes)
            await generate(wishes, self._host, results.__setitem__)
            failed = next((r for r in results if isinstance(r, Exception)), None)
            if failed is not None:
                raise failed
            return Reply(content=orjson.dumps({"job_id": self._host.spec.job_id, "results": results}))

        operation = await self._submit("generate", work, request_id, received.frame, is_sequenced=False)
        return self._accepted(operation.id)

    async def _generate_stream(self, request: Request) -> Response:
        body = await request.body()
        tree = json_object(body) if body[:1] == b"{" else decode_frame(body)
        wishes = read_wishes(tree, self._host)
        stream = Stream()

        def on_result(index: int, result: Any) -> None:
            if isinstance(result, Exception):
                stream.events.append(error_event(index, result))  # pyright: ignore[reportArgumentType]
            else:
                stream.events.append({"type": "result", "index": index, "result": result})

        async def work() -> Reply:
            await generate(wishes, self._host, on_result)
            failed = sum(event["type"] == "error" for event in stream.events)
            done = {"type": "done", "completed": len(wishes) - failed, "failed": failed}
            stream.events.append(done)
            return Reply(content=orjson.dumps(done))

        request_id = _request_id(None)
        await self._submit("generate-stream", work, request_id, body, is_sequenced=False)
        self._keep_stream(request_id, stream)
        return json_response(
            {"request_id": request_id, "job_id": self._host.spec.job_id, "count": len(wishes)}
        )

    # --- operations ---

    async def _operation(self, request: Request) -> Response:
        raw = await request.body()
        body = parse(OperationBody, raw)
        handlers: dict[str, Callable[[OperationBody, bytes], Any]] = {
            "weight-sync": self._weight_sync,
            "forward": self._forward,
            "reset-prefix-cache": self._reset_prefix_cache,
            "cancel-request": self._cancel_request,
        }
        handler = handlers.get(body.operation_type)
        if handler is None:
            raise Refusal(
                ErrorCode.INVALID,
                f"no operation {body.operation_type!r} here; there are tail-logs, {', '.join(handlers)}",
                path="operation_type",
            )
        return await handler(body, raw)

    async def _weight_sync(self, body: OperationBody, raw: bytes) -> Response:
        try:
            payload = WeightSyncBody.model_validate(body.payload or {})
        except ValidationError as error:
            raise invalid(error) from None
        self._require_trainer_id(payload.source_sub_job_id, "payload.source_sub_job_id")
        for target in payload.target_sub_job_ids:
            self._require_sub_job(target, "sampling", "payload.target_sub_job_ids")
        if payload.weight_format == "lora" and self._host.spec.body.adapter is None:
            raise Refusal(
                ErrorCode.INVALID,
                "weight_format lora needs a peft_config on both sub-jobs; use hf",
                path="payload.weight_format",
            )

        async def work() -> Reply:
            return json_reply((await self._host.publish()).model_dump_json())

        return self._accepted((await self._submit("weight-sync", work, _request_id(None), raw)).id)

    async def _forward(self, body: OperationBody, raw: bytes) -> Response:
        frame = _payload_bytes(body)

        async def work() -> Reply:
            rows = await asyncio.to_thread(lambda: read_rows(decode_frame(frame)))
            logprobs = await self._host.engine.forward(rows.samples, temperature=rows.temperature)
            reply = {
                "job_id": self._host.spec.job_id,
                "post_process_outputs": {"logprobs": to_rows(rows.layout, logprobs)},
            }
            return Reply(content=encode_frame(reply), media_type=OCTET_STREAM)

        operation = await self._submit("forward", work, _request_id(None), raw, is_sequenced=False)
        return self._accepted(operation.id)

    async def _reset_prefix_cache(self, body: OperationBody, raw: bytes) -> Response:
        # The sync itself drops every context that was computed under older weights.
        return json_response({"reset": True, "weights_version": self._host.engine.weights_version})

    async def _cancel_request(self, body: OperationBody, raw: bytes) -> Response:
        request_id = (body.payload or {}).get("request_id")
        if not isinstance(request_id, str):
            raise Refusal(ErrorCode.INVALID, "give payload.request_id", path="payload.request_id")
        operation = self._host.operations.get(request_id)
        if operation is None:
            raise Refusal(ErrorCode.NOT_FOUND, "no request of that id")
        return json_response(
            {"request_id": request_id, "cancelled": self._host.operations.cancel(request_id)}
        )

    async def _request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        operation = self._host.operations.get(request_id)
        if operation is None:
            raise Refusal(ErrorCode.NOT_FOUND, "no request of that id, or its result was let go")
        query = request.query_params
        reply = await asyncio.to_thread(
            describe,
            operation,
            self._streams.get(request_id),
            max_events=query.get("max_events"),
            cursor=query.get("cursor"),
        )
        return json_response(reply)

    # --- parts ---

    async def _submit(
        self, verb: str, work: Work, operation_id: str, body: bytes, *, is_sequenced: bool = True
    ) -> Operation:
        return await self._host.submit(
            verb, work, operation_id=operation_id, body=body, is_sequenced=is_sequenced, sequence=None
        )

    def _keep_stream(self, request_id: str, stream: Stream) -> None:
        """Keep the events of a stream, and let go those of requests that were let go."""
        while self._streams and self._host.operations.get(oldest := next(iter(self._streams))) is None:
            del self._streams[oldest]
        self._streams[request_id] = stream

    def _accepted(self, request_id: str) -> Response:
        return json_response({"request_id": request_id, "job_id": self._host.spec.job_id})

    def _require_trainer_id(self, sub_job_id: str, path: str) -> None:
        self._require_sub_job(sub_job_id, "training", path)

    def _require_sub_job(self, sub_job_id: str, job_type: str, path: str) -> None:
        known = [
            name
            for name in sub_job_ids(self._host.spec.job_id, self._host.spec.body)
            if f":{job_type}:" in name[len(self._host.spec.job_id) :]
        ]
        if sub_job_id not in known:
            raise Refusal(
                ErrorCode.INVALID, f"{sub_job_id} is no {job_type} sub-job here; there are {known}", path=path
            )


def _request_id(group_id: str | None) -> str:
    return f"req-{uuid.uuid4().hex if group_id is None else uuid.uuid5(uuid.NAMESPACE_OID, group_id).hex}"


def _payload_bytes(body: OperationBody) -> bytes:
    payload = body.payload or {}
    text = payload.get("payload_b64")
    try:
        return base64.b64decode(text, validate=True)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise Refusal(
            ErrorCode.INVALID,
            "payload.payload_b64 holds a DSSST1 frame in base64",
            path="payload.payload_b64",
        ) from None


def _stock_metrics(result: Any) -> dict[str, float]:
    """Return the figures under the names that stock clients read; what was not measured is absent."""
    named = {
        "loss": result.loss,
        "approx_kl": result.gap_k3,
        "clip_ratio": result.clip_fraction,
        "kl_to_reference": result.kl_to_reference,
        "trained_tokens": result.trained_tokens,
    }
    return {name: float(value) for name, value in named.items() if value is not None and math.isfinite(value)}
