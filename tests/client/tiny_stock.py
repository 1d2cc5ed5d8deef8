"""The smallest service of the stock wire: gradients are replaced, a step sent twice is applied twice.

It reads bodies with the package's own reading of the stock dialect; the weight is one number.
"""

import json
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.client.tiny_core import PREFIX

from pilotage.wire.chunks import ChunkKind, join_chunks, read_descriptor
from pilotage.wire.frames import decode_frame
from pilotage.wire.grpo import from_stock, to_rows


class TinyStock:
    """One job, already running. Its attributes are read and set by tests."""

    def __init__(self) -> None:
        self.weight, self.gradient, self.steps = 1.0, 0.0, 0
        self.status = "running"
        self.operations: list[str] = []
        self.bodies: list[Any] = []
        self.wishes: list[Any] = []
        self.forgets_chunks_once = False
        self.checkpoints: list[str] = []
        self._results: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, str] = {}
        self.app = Starlette(
            routes=[
                Route(f"{PREFIX}/{{job}}/forward-backward", self._forward_backward, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/step", self._step, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/save", self._save, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/load", self._load, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/generate", self._generate, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/operation", self._operation, methods=["POST"]),
                Route(f"{PREFIX}/{{job}}/requests/{{id}}", self._request),
                Route(f"{PREFIX}/{{job}}/checkpoints/{{id}}", self._delete, methods=["DELETE"]),
                Route(f"{PREFIX}/{{job}}", self._get),
            ]
        )

    def _accept(self, operation: str, result: dict[str, Any]) -> Response:
        request_id = f"req-{len(self._results)}"
        self.operations.append(operation)
        self._results[request_id] = {"status": "completed", "result": result}
        return JSONResponse({"request_id": request_id, "job_id": "j"})

    async def _get(self, request: Request) -> Response:
        record = {
            "job_id": "j",
            "status": self.status,
            "reason": "idle_timeout",
            "created_at": "",
            "updated_at": "",
        }
        return JSONResponse(record)

    async def _forward_backward(self, request: Request) -> Response:
        body = await request.body()
        descriptor = read_descriptor(body)
        assert descriptor is not None
        assert descriptor.chunk_group_id is not None
        if self.forgets_chunks_once:
            self.forgets_chunks_once = False
            return JSONResponse({"code": "chunk_group_restart_required", "message": "start at 0"}, 409)
        if descriptor.chunk_group_id in self._groups:
            return JSONResponse({"request_id": self._groups[descriptor.chunk_group_id]})
        batch = from_stock(decode_frame(join_chunks([body], ChunkKind.REQUEST)))
        assert batch.denominators is not None
        advantages = sum(float(sample.advantages.sum()) for sample in batch.samples)
        self.gradient = advantages / batch.denominators.num_sequences  # replaces what was there
        scored = [np.where(s.loss_mask, np.float32(-1.25), np.float32(0)) for s in batch.samples]
        result = {
            "avg_loss": -self.gradient,
            "metrics": {"clip_ratio": 0.125},
            "post_process_outputs": {"logprobs": to_rows(batch.layout, scored).tolist()},
        }
        self._groups[descriptor.chunk_group_id] = f"req-{len(self._results)}"
        return self._accept("forward-backward", result)

    async def _step(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.weight -= body["learning_rate"] * self.gradient
        self.steps += 1
        return self._accept("step", {"global_steps": self.steps, "last_lr": [body["learning_rate"]]})

    async def _save(self, request: Request) -> Response:
        self.checkpoints.append(f"cp_{len(self.checkpoints)}")
        path = f"@stage/j/{self.checkpoints[-1]}/weights"
        return self._accept("save", {"stage_path": path, "checkpoint_tag": f"global_step{self.steps}"})

    async def _load(self, request: Request) -> Response:
        self.bodies.append(json.loads(await request.body()))
        return self._accept("load", {})

    async def _generate(self, request: Request) -> Response:
        tree: Any = decode_frame(await request.body())
        self.wishes.append(tree)
        # Sampled 5, 6, 0; the most likely token comes first, and is not the sampled one.
        entries = [{"9": -0.1, str(token): -0.5 * token} for token in (5, 6, 0)]
        found = {"token_ids": [5, 6, 0], "finish_reason": "stop", "logprobs": entries}
        return self._accept("generate", {"results": [found]})

    async def _operation(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if body["operation_type"] == "weight-sync":
            return self._accept("weight-sync", {})
        self.operations.append(body["operation_type"])
        return JSONResponse({})

    async def _request(self, request: Request) -> Response:
        return JSONResponse(self._results[request.path_params["id"]])

    async def _delete(self, request: Request) -> Response:
        self.checkpoints.remove(request.path_params["id"])
        return Response(status_code=204)
