"""The Tinker wire, as the engine process answers it: each call becomes an operation of the ledger.

The SDK numbers the calls of a model 1, 2, ... and repeats those whose reply it did not get: its numbers are
our sequence numbers, so a call is executed once, in its place, whatever the network does. What it calls a
future is an operation, and its result is fetched from the ledger.

A sampling client belongs to a generation: the weights of one publish, counted here, because a version of
the engine's comes back when a checkpoint is loaded. There is one sampler, which takes over new weights in
place; a client of older weights is told so, and never samples from newer ones. One that was made `inflight`
follows the weights. A client's id is JOB:GENERATION:NAME; the name is its own, as each numbers its own calls.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.errors import InvalidBodyError
from pilotage.service.bodies import json_object, parse
from pilotage.service.core_routes import SOURCE_HEADER, wait_of
from pilotage.service.engine_host import EngineHost, json_reply
from pilotage.service.generation import together
from pilotage.service.operations import Reply
from pilotage.service.refusals import Refusal, json_response
from pilotage.service.tinker_bodies import (
    LoadWeightsBody,
    OptimStepBody,
    SampleBody,
    SamplingWishes,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from pilotage.service.tinker_losses import LINEAR, ONE, as_samples, evaluate, require_known, scored
from pilotage.service.tinker_stops import Stops, read_stops
from pilotage.types import AdamParams, Completion, Logprobs, SamplingParams, TokenIds
from pilotage.wire.core import ErrorCode, LoadBody, SaveBody
from pilotage.wire.tinker import (
    PROTOBUF,
    ForwardBackward,
    forward_backward_json,
    read_forward_backward,
    read_forward_backward_json,
    read_prompt,
    samples_json,
    write_forward_backward,
    write_samples,
)

LIVE = "live"
"""Generation of sampling clients that follow the weights."""
_FOR_SAMPLER = "sampler-"
"""Start of the ids of checkpoints that were saved for a sampler."""
_FORMS = {"forward_backward": forward_backward_json, "asample": samples_json}
"""Verbs whose results are stored as protobuf, and how they become JSON."""


class TinkerRoutes:
    """Endpoints under /tinker."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._published_steps: int | None = 0
        """`global_steps` of the weights that the sampler has; None after a load."""
        self._generation = 0
        self._generation_of: dict[str, int] = {}
        """Checkpoint -> generation, of weights that were saved for the sampler."""
        self._verbs: dict[str, Callable[[bytes, Mapping[str, str]], Awaitable[Reply]]] = {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
        }

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/tinker/asample", self._run_sample, methods=["POST"]),
            Route("/tinker/cancel/{operation_id}", self._cancel, methods=["POST"]),
            Route("/tinker/generations/{checkpoint_id}", self._current, methods=["GET"]),
            Route("/tinker/results/{operation_id}", self._result, methods=["GET"]),
            Route("/tinker/{verb}", self._run_sequenced, methods=["POST"]),
        ]

    # --- calls ---

    async def _run_sequenced(self, request: Request) -> Response:
        """Queue a call of the trainer at its number. It is read when it is its turn: a call that is refused
        has used its number up, so that those behind it do not wait for ever.
        """
        verb = request.path_params["verb"]
        run = self._verbs.get(verb)
        if run is None:
            raise Refusal(ErrorCode.NOT_FOUND, f"no call {verb!r} here")
        body = await request.body()
        sequence = int(request.query_params["sequence"])
        operation = await self._host.submit(
            verb,
            lambda: run(body, request.headers),
            operation_id=f"t{sequence}",
            body=body,
            is_sequenced=True,
            sequence=sequence,
        )
        return json_response({"operation_id": operation.id})

    async def _run_sample(self, request: Request) -> Response:
        call = parse(SampleBody, body := await request.body())
        prompt = read_prompt(call.prompt, path="prompt")
        stops = read_stops(call.sampling_params.stop, self._host)
        params = self._sampling_params(call.sampling_params, prompt)

        async def work() -> Reply:
            return Reply(content=await self._sample(call, prompt, params, stops), media_type=PROTOBUF)

        name = f"s{sha256(call.sampling_session_id.encode()).hexdigest()[:16]}-{call.seq_id}"
        operation = await self._host.submit(
            "asample", work, operation_id=name, body=body, is_sequenced=False, sequence=None
        )
        return json_response({"operation_id": operation.id, "num_samples": call.num_samples})

    async def _current(self, request: Request) -> Response:
        """Say whether the sampler has the weights of a checkpoint."""
        generation = self._generation_of.get(request.path_params["checkpoint_id"])
        return json_response({"generation": generation if generation == self._generation else None})

    async def _cancel(self, request: Request) -> Response:
        self._host.operations.cancel(request.path_params["operation_id"])
        return json_response({})

    async def _result(self, request: Request) -> Response:
        """Answer 202 while there is no outcome; an outcome is 200, also where the call failed."""
        operation = self._host.operations.get(request.path_params["operation_id"])
        if operation is None:
            raise Refusal("gone", "the result of this request was let go", status=410)
        if not await operation.wait(wait_of(request)):
            return json_response({}, 202)
        if operation.error is not None:
            is_users = operation.error.code in (
                ErrorCode.INVALID,
                ErrorCode.CONTEXT_EXCEEDED,
                ErrorCode.CONFLICT,
            )
            message = operation.error.message
            return json_response({"error": message, "category": "user" if is_users else "server"})
        assert operation.reply is not None
        content = operation.reply.content
        if operation.reply.media_type == PROTOBUF and PROTOBUF not in request.headers.get("accept", ""):
            return json_response(await asyncio.to_thread(_FORMS[operation.verb], content))
        return Response(content, media_type=operation.reply.media_type)

    # --- what runs when it is their turn ---

    async def _forward_backward(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        is_protobuf = headers.get("content-type", "").startswith(PROTOBUF)

        def read() -> ForwardBackward:
            return (
                read_forward_backward(body) if is_protobuf else read_forward_backward_json(json_object(body))
            )

        call = await asyncio.to_thread(read)
        require_known(call.loss_fn, call.config)
        longest = max((datum.input_ids.size + 1 for datum in call.data), default=0)
        if not 0 < longest <= self._host.engine.max_context_tokens:
            raise InvalidBodyError(
                "data", f"a datum has 1 to {self._host.engine.max_context_tokens} tokens, got {longest}"
            )
        masks = [scored(datum) for datum in call.data]
        zeros = [np.zeros(mask.size) for mask in masks]
        rows = await self._host.engine.forward(as_samples(call.data, masks, zeros), temperature=1.0)
        logprobs = [row[1:] for row in rows]
        exact = [values.astype(np.float64) for values in logprobs]
        loss = await asyncio.to_thread(evaluate, call.loss_fn, call.config, call.data, exact)
        if not call.is_forward_only:
            counted = [gradient != 0 for gradient in loss.gradients]
            linear = as_samples(call.data, counted, [-gradient for gradient in loss.gradients])
            await self._host.forward_backward(linear, LINEAR, ONE)
        metrics = {"loss:sum": loss.value}
        content = await asyncio.to_thread(write_forward_backward, logprobs, metrics)
        return Reply(content=content, media_type=PROTOBUF, values=metrics)

    async def _optim_step(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        adam = parse(OptimStepBody, body).adam_params
        result = await self._host.step(
            AdamParams(
                learning_rate=adam.learning_rate,
                beta1=adam.beta1,
                beta2=adam.beta2,
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=adam.grad_clip_norm,
            )
        )
        metrics = {"grad_norm": result.grad_norm}
        content = orjson.dumps({"type": "optim_step", "metrics": metrics})
        return Reply(content=content, values=metrics)

    async def _save_weights(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        call = parse(SaveWeightsBody, body)
        name = call.path or f"seq-{call.seq_id}"
        if call.overwrite:
            with contextlib.suppress(Refusal):  # there is none yet
                self._host.checkpoints.delete(name)
        await self._save(name, weights_only=False)
        return _json({"type": "save_weights", "path": f"tinker://{call.model_id}/{name_of(name)}"})

    async def _save_for_sampler(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        call = parse(SaveForSamplerBody, body)
        await self._publish()
        if call.path is None:
            generation = LIVE if call.kind == "inflight" else self._generation
            session = f"{self._host.spec.job_id}:{generation}:t{call.seq_id}"
            return _json({"type": "save_weights_for_sampler", "sampling_session_id": session})
        checkpoint_id = _FOR_SAMPLER + call.path
        await self._save(checkpoint_id, weights_only=True)
        self._generation_of[checkpoint_id] = self._generation
        path = f"tinker://{call.model_id}/{name_of(checkpoint_id)}"
        return _json({"type": "save_weights_for_sampler", "path": path})

    async def _load_weights(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        call = parse(LoadWeightsBody, body)
        _, checkpoint_id = checkpoint_of(call.path)
        wanted = LoadBody(checkpoint_id=checkpoint_id, weights_only=not call.optimizer)
        await self._host.load(wanted, Path(headers[SOURCE_HEADER]))
        self._published_steps = None
        return _json({"type": "load_weights", "path": call.path, "model_id": call.model_id})

    async def _save(self, checkpoint_id: str, *, weights_only: bool) -> None:
        self._host.checkpoints.path_of(checkpoint_id)  # refuses an id that is none
        await self._host.save(SaveBody(checkpoint_id=checkpoint_id, weights_only=weights_only))

    async def _publish(self) -> None:
        """Give the sampler the trainer's weights, unless it has them."""
        if self._published_steps != self._host.global_steps:
            self._generation += 1  # before, so that nobody samples for the older one while they change
            await self._host.publish()
            self._published_steps = self._host.global_steps

    async def _sample(
        self, call: SampleBody, prompt: TokenIds, params: SamplingParams, stops: Stops
    ) -> bytes:
        async def one(index: int) -> Completion:
            self._require_current(call.sampling_session_id)
            completion = await self._host.engine.sample(
                prompt, params, session_id=call.sampling_session_id, turn_index=index
            )
            self._require_current(call.sampling_session_id)
            return await stops.cut(completion)

        completions = await together([one(index) for index in range(call.num_samples)])
        prompt_logprobs = await self._prompt_logprobs(prompt) if call.prompt_logprobs else None
        return write_samples(completions, prompt_logprobs)

    def _require_current(self, session_id: str) -> None:
        generation = session_id.split(":")[-2]
        if generation not in (LIVE, str(self._generation)):
            raise InvalidBodyError(
                "sampling_session_id",
                "the weights of this sampling client were replaced: take a new client after every"
                " save_weights_for_sampler, or make it kind inflight",
            )

    async def _prompt_logprobs(self, prompt: TokenIds) -> Logprobs:
        """Return [prompt] log-probs at temperature 1, NaN for the first token.

        Raises:
            Refusal: the trainer has been stepped since the sampler got its weights.
        """
        if self._host.spec.body.trainer is not None and self._published_steps != self._host.global_steps:
            raise Refusal(
                ErrorCode.CONFLICT,
                "prompt_logprobs come from the trainer, whose weights are newer than the sampler's: save"
                " weights for the sampler first",
            )
        logprobs = (await self._host.prompt_logprobs(prompt, temperature=1.0)).copy()
        logprobs[0] = np.nan
        return logprobs

    # --- parts ---

    def _sampling_params(self, wishes: SamplingWishes, prompt: TokenIds) -> SamplingParams:
        room = max(1, self._host.engine.max_context_tokens - prompt.size)
        try:
            return SamplingParams(
                temperature=wishes.temperature,
                top_p=wishes.top_p,
                top_k=0 if wishes.top_k == -1 else wishes.top_k,
                max_tokens=wishes.max_tokens or room,
                seed=wishes.seed,
            )
        except ValueError as error:
            raise Refusal(ErrorCode.INVALID, str(error), path="sampling_params") from None


def checkpoint_of(path: str) -> tuple[str, str]:
    """Split `tinker://MODEL/weights/NAME` (or `sampler_weights`) into model and checkpoint id.

    Raises:
        Refusal: it is no such path.
    """
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in ("weights", "sampler_weights"):
        raise Refusal(
            ErrorCode.INVALID,
            "a path is tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME",
            path="path",
        )
    return parts[0], parts[2] if parts[1] == "weights" else _FOR_SAMPLER + parts[2]


def name_of(checkpoint_id: str) -> str:
    """Return KIND/NAME, as a path names a checkpoint: what `checkpoint_of` reads."""
    if checkpoint_id.startswith(_FOR_SAMPLER):
        return f"sampler_weights/{checkpoint_id.removeprefix(_FOR_SAMPLER)}"
    return f"weights/{checkpoint_id}"


def _json(content: Mapping[str, Any]) -> Reply:
    return json_reply(orjson.dumps(content).decode())
