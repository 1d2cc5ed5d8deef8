"""The strict core, as the engine process answers it; `wire.core` is the contract."""

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.service.bodies import parse
from pilotage.service.engine_host import EngineHost, figures, json_reply
from pilotage.service.operations import Operation, Reply, Work
from pilotage.service.refusals import Refusal, error_response, json_response
from pilotage.types import AdamParams
from pilotage.wire.core import (
    FREE_VERBS,
    OCTET_STREAM,
    OPERATION_ID_PATTERN,
    SEQUENCED_VERBS,
    ErrorCode,
    LoadBody,
    OperationState,
    SaveBody,
)
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.records import pack_result, record_from_json, record_to_json
from pilotage.wire.samples import (
    pack_completion,
    pack_logprobs,
    unpack_forward_request,
    unpack_sample_request,
    unpack_samples,
)

SOURCE_HEADER = "x-pilotage-source"
"""Set by the front on loads: the directory of the job whose checkpoint is read."""
MAX_WAIT_S = 30.0
_INLINE_BYTES = 2**18
"""Smaller frames are decoded on the loop: a thread costs more."""


class CoreRoutes:
    """Endpoints under /core."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._verbs: dict[str, Callable[[bytes, Request], Work]] = {
            "forward_backward": self._forward_backward,
            "step": self._step,
            "discard": self._discard,
            "publish": self._publish,
            "save": self._save,
            "load": self._load,
            "sample": self._sample,
            "forward": self._forward,
        }

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/core", self._state, methods=["GET"]),
            Route("/core/operations/{operation_id}", self._operation, methods=["GET"]),
            Route("/core/{verb}", self._call, methods=["POST"]),
        ]

    async def _state(self, request: Request) -> Response:
        return json_response(self._host.state.model_dump())

    async def _call(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in self._verbs:
            names = ", ".join((*SEQUENCED_VERBS, *FREE_VERBS))
            raise Refusal(ErrorCode.NOT_FOUND, f"no verb {verb!r}; there are {names}")
        operation_id = _operation_id(request)
        is_sequenced = verb in SEQUENCED_VERBS
        sequence = _sequence(request) if is_sequenced else None
        wait_s = wait_of(request)
        body = await request.body()
        operation = await self._host.submit(
            verb,
            self._verbs[verb](body, request),
            operation_id=operation_id,
            body=body,
            is_sequenced=is_sequenced,
            sequence=sequence,
        )
        return await _outcome(operation, wait_s)

    async def _operation(self, request: Request) -> Response:
        operation = self._host.operations.get(request.path_params["operation_id"])
        if operation is None:
            raise Refusal(ErrorCode.NOT_FOUND, "no operation of that id, or its outcome was let go")
        return await _outcome(operation, wait_of(request))

    # --- verbs: what runs when it is their turn ---

    def _forward_backward(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            samples, loss, denominators = await _in_thread(body, lambda: unpack_samples(decode_frame(body)))
            result = await self._host.forward_backward(samples, loss, denominators)
            content = encode_frame(pack_result(result))
            return Reply(content=content, media_type=OCTET_STREAM, values=figures(result))

        return work

    def _step(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            result = await self._host.step(_adam(body))
            return Reply(content=record_to_json(result), values=figures(result))

        return work

    def _discard(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            await self._host.engine.discard()
            return json_reply("{}")

        return work

    def _publish(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            return json_reply((await self._host.publish()).model_dump_json())

        return work

    def _save(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            return json_reply((await self._host.save(parse(SaveBody, body))).model_dump_json())

        return work

    def _load(self, body: bytes, request: Request) -> Work:
        source = Path(request.headers.get(SOURCE_HEADER, str(self._host.spec.directory)))

        async def work() -> Reply:
            return json_reply((await self._host.load(parse(LoadBody, body), source)).model_dump_json())

        return work

    def _sample(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            wanted = unpack_sample_request(decode_frame(body))
            completion = await self._host.engine.sample(
                wanted.prompt_ids,
                wanted.params,
                session_id=wanted.session_id,
                turn_index=wanted.turn_index,
            )
            return Reply(content=encode_frame(pack_completion(completion)), media_type=OCTET_STREAM)

        return work

    def _forward(self, body: bytes, request: Request) -> Work:
        async def work() -> Reply:
            samples, temperature = await _in_thread(body, lambda: unpack_forward_request(decode_frame(body)))
            logprobs = await self._host.engine.forward(samples, temperature=temperature)
            return Reply(content=encode_frame(pack_logprobs(logprobs)), media_type=OCTET_STREAM)

        return work


async def _in_thread[T](body: bytes, decode: Callable[[], T]) -> T:
    return decode() if len(body) <= _INLINE_BYTES else await asyncio.to_thread(decode)


async def _outcome(operation: Operation, wait_s: float) -> Response:
    if not await operation.wait(wait_s):
        status = "waiting" if operation.status == "waiting" else "running"
        return json_response(OperationState(operation_id=operation.id, status=status).model_dump(), 202)
    if operation.error is not None:
        return error_response(operation.error)
    assert operation.reply is not None
    assert operation.work_s is not None
    timing = {"server-timing": f"work;dur={operation.work_s * 1e3:.3f}"}
    return Response(operation.reply.content, media_type=operation.reply.media_type, headers=timing)


def _adam(body: bytes) -> AdamParams:
    """Read the parameters of a step: all of them, so that none is silently a default of the server's."""
    params = record_from_json(AdamParams, body)
    missing = [field.name for field in fields(AdamParams) if field.name not in orjson.loads(body)]
    if missing:
        raise Refusal(
            ErrorCode.INVALID, f"a step names all Adam parameters; missing {missing[0]}", path=missing[0]
        )
    return params


def _operation_id(request: Request) -> str:
    operation_id = request.query_params.get("operation_id", "")
    if not re.fullmatch(OPERATION_ID_PATTERN, operation_id):
        raise Refusal(ErrorCode.INVALID, "give operation_id: 1 to 64 of A-Z a-z 0-9 _ -", path="operation_id")
    return operation_id


def _sequence(request: Request) -> int:
    text = request.query_params.get("sequence", "")
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not 0 < int(text) < 2**62:
        raise Refusal(ErrorCode.INVALID, "give sequence: 1, 2, ... of this job", path="sequence")
    return int(text)


def wait_of(request: Request) -> float:
    """Return how long the reply may be held, in seconds.

    Raises:
        Refusal: the query says nonsense.
    """
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise Refusal(ErrorCode.INVALID, f"wait_s lies in 0..{MAX_WAIT_S:g}", path="wait_s")
    return wait_s
