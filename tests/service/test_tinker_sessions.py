"""The Tinker wire's sessions and names: who keeps a job, who may ask for it, and what outlives a front."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.service.rig import Rig, rig
from tests.service.test_lifecycle import Clock
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto

PROTOBUF = {"content-type": "application/x-protobuf"}
ADAM = {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


async def ask(service: Rig, name: str, *, status: int = 200, **body: Any) -> Any:
    reply = await service.http.post(f"/api/v1/{name}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def result(service: Rig, request_id: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            reply = await ask(service, "retrieve_future", request_id=request_id)
            if reply.get("type") != "try_again":
                return reply


async def open_model(service: Rig, number: int = 0, session: str = "") -> tuple[str, str]:
    """Create a model; returns its session and id."""
    if not session:
        session = (await ask(service, "create_session", tags=[], sdk_version="0.38"))["session_id"]
    asked = await ask(service, "create_model", session_id=session, model_seq_id=number, base_model="policy")
    made = await result(service, asked["request_id"])
    assert made == {"type": "create_model", "model_id": f"{session}:train:{number}"}
    return session, made["model_id"]


def gradient(model_id: str, sequence: int) -> bytes:
    ids = [5, 6, 7, 8]
    inputs: Any = {"target_tokens": ids[1:], "weights": np.ones(3, np.float32)}
    datum = sdk.Datum(model_input=sdk.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    given = sdk.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = sdk.ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=sequence)
    return forward_backward_request_to_proto(request).SerializeToString()


async def post_gradient(service: Rig, model_id: str, sequence: int) -> httpx.Response:
    return await service.http.post(
        "/api/v1/forward_backward", content=gradient(model_id, sequence), headers=PROTOBUF
    )


async def test_a_sessions_jobs_live_by_its_heartbeats_and_end_when_it_is_finished(tmp_path: Path) -> None:
    clock = Clock()
    async with rig(tmp_path, clock=clock) as service:
        kept, kept_model = await open_model(service)
        _, lost_model = await open_model(service)
        for _ in range(12):  # 34 minutes: longer than a job without calls lives elsewhere
            clock.now += 170
            await ask(service, "session_heartbeat", session_id=kept)
            await asyncio.sleep(0.3)  # the service looks at leases five times a second
        job_of = {m: service.jobs._jobs[m.replace(":", ".")] for m in (kept_model, lost_model)}
        async with asyncio.timeout(30):
            while job_of[lost_model].status != "cancelled":  # noqa: ASYNC110 - a job tells nobody
                await asyncio.sleep(0.02)
        assert job_of[lost_model].reason == "lease_expired: its driver is gone"
        assert job_of[kept_model].status == "running"
        reply = await ask(service, "retrieve_future", request_id=f"{job_of[lost_model].id}:created")
        assert "lease_expired" in reply["error"]
        await ask(service, f"sessions/{kept}/finish", reason={"type": "success"})
        assert job_of[kept_model].status == "cancelled"


async def test_calls_that_are_repeated_or_come_out_of_order_run_once_in_their_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        _, model = await open_model(service)
        step: dict[str, Any] = {"model_id": model, "seq_id": 3, "adam_params": ADAM}
        late = await ask(service, "optim_step", **step)
        second = await post_gradient(service, model, 2)
        first = await post_gradient(service, model, 1)
        for again in (await post_gradient(service, model, 1), await post_gradient(service, model, 2)):
            assert again.json() in (first.json(), second.json())
        assert await ask(service, "optim_step", **step) == late
        done = await result(service, late["request_id"])
        assert done["metrics"]["grad_norm"] == 6.0  # two gradients of three tokens
        losses = [await result(service, r.json()["request_id"]) for r in (first, second)]
        assert [loss["metrics"] for loss in losses] == [{"loss:sum": 1.5}, {"loss:sum": 1.5}]
        other = await service.http.post(
            "/api/v1/optim_step", json=step | {"adam_params": ADAM | {"eps": 1.0}}
        )
        assert other.status_code == 409


async def test_a_front_that_was_killed_knows_models_results_and_sampling_clients_again(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, ends_jobs=False) as service:
        session, model = await open_model(service)
        asked = (await post_gradient(service, model, 1)).json()
        saved = await ask(service, "save_weights_for_sampler", model_id=model, seq_id=2)
        before = await result(service, asked["request_id"])
    async with rig(tmp_path) as service:
        assert await result(service, asked["request_id"]) == before
        client = (await result(service, saved["request_id"]))["sampling_session_id"]
        sample: dict[str, Any] = {
            "sampling_session_id": client,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2, "seed": 1},
            "num_samples": 2,
        }
        first = await ask(service, "asample", **sample)
        assert await ask(service, "asample", **sample) == first
        assert len((await result(service, first["request_id"]))["sequences"]) == 2
        assert (await open_model(service, 0, session))[1] == model


async def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        session, model = await open_model(service)
        create = {"session_id": session, "model_seq_id": 1, "base_model": "policy"}
        for changes, message in (
            ({"base_model": "other"}, "no model 'other' here; there are policy"),
            ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config"),
            ({"wishes": 1}, "unknown key wishes"),
            ({"session_id": "../x"}, "that is no session id"),
        ):
            reply = await service.http.post("/api/v1/create_model", json=create | changes)
            assert reply.status_code in (404, 422)
            assert message in reply.json()["message"]
        sample = {
            "sampling_session_id": f"{model.replace(':', '.')}:0:x",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2},
        }
        for changes, message in (
            ({"sampling_params": {"stop": []}}, "always end a completion"),
            ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs"),
            ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "only chunks of token ids"),
            ({"sampling_params": {"temperature": -1}}, "temperature must lie in"),
        ):
            reply = await service.http.post("/api/v1/asample", json=sample | changes)
            assert reply.status_code == 422, reply.text
            assert message in reply.json()["message"]
        for path in ("x", "tinker://a/b", f"tinker://{model}/weights/none"):
            reply = await service.http.post("/api/v1/weights_info", json={"tinker_path": path})
            assert reply.status_code in (404, 422)
