"""Whatever bytes a client sends: an answer in time, errors in the one shape, and a service that goes on."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from tests.service.rig import PREFIX, Rig, batch, rig, sample

from pilotage.service.openapi import document
from pilotage.types import SamplingParams
from pilotage.wire.chunks import ChunkKind, split_frame
from pilotage.wire.core import ErrorBody
from pilotage.wire.frames import TreeLike, encode_frame
from pilotage.wire.samples import pack_forward_request, pack_sample_request

TOKENIZER = Path(__file__).parents[2] / "recipes" / "demo" / "policy" / "tokenizer.json"
REQUEST_S = 60.0
"""A call that takes so long hangs, even on a machine that is busy with other things."""
EXAMPLES = 6
"""Of each kind, for each operation."""
MAX_GROWTH_BYTES = 24 * 2**20
"""Of the engine process over the frames of a test: 400 outcomes at the 4 KiB that the ledger allows each are
2 MiB; the rest is the allocator's."""
A_LEAKED_EXCEPTION = re.compile(
    r"\b(Type|Key|Attribute|Index|Overflow|Assertion|Unicode\w*)Error\b|ExceptionGroup"
)


def check(reply: httpx.Response, what: str) -> None:
    """Assert what holds for every answer."""
    assert reply.status_code < 500 or reply.status_code == 503, f"{what}: {reply.status_code} {reply.text}"
    if reply.status_code >= 400:
        error = ErrorBody.model_validate_json(reply.content)
        assert not A_LEAKED_EXCEPTION.search(error.message), f"{what}: {error.message}"


async def ask(service: Rig, method: str, url: str, what: str = "", **request: Any) -> httpx.Response:
    async with asyncio.timeout(REQUEST_S):
        reply = await service.http.request(method, url, **request)
    check(reply, what or f"{method} {url}")
    return reply


async def running(service: Rig, directory: Path) -> str:
    shutil.copy(TOKENIZER, directory / "models" / "policy")  # generate replies with text
    job_id = await service.create()
    assert await service.until(job_id, "running", timeout_s=120) == "running"
    return job_id


async def still_works(service: Rig, job_id: str) -> None:
    """Make a well-formed call of each kind; the ledger goes on at the number that it states."""
    completion = await service.core(job_id, "sample", operation_id="last-sample", content=sample_frame())
    assert completion.status_code == 200, completion.text
    generated = await service.http.post(f"{PREFIX}/{job_id}/generate", content=generate_frame())
    state = await poll(service, job_id, generated.json()["request_id"], "the last generate")
    assert state["status"] == "completed", state
    next_sequence = (await service.http.get(f"{PREFIX}/{job_id}/core")).json()["next_sequence"]
    for number in range(1, next_sequence + 1):  # numbers that were skipped hold up those that came after
        reply = await service.http.post(
            f"{PREFIX}/{job_id}/core/publish", params={"operation_id": f"last-{number}", "sequence": number}
        )
        assert reply.status_code in (200, 202, 409), reply.text
    done = await service.http.get(
        f"{PREFIX}/{job_id}/core/operations/last-{next_sequence}", params={"wait_s": 20}
    )
    assert done.status_code == 200, done.text


def sample_frame() -> bytes:
    return encode_frame(
        pack_sample_request(np.array([1, 2], np.int32), SamplingParams(), session_id="s", turn_index=0)
    )


def generate_frame(**params: TreeLike) -> bytes:
    return encode_frame(
        {"prompts": [np.array([1, 2], np.int32)], "sampling_params": {"max_tokens": 2, **params}}
    )


def resident_bytes(service: Rig, job_id: str) -> int:
    address = next(job.address for job in service.jobs.list_of_owner("local") if job.id == job_id)
    assert address is not None
    status = Path(f"/proc/{address.process.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


# --- the OpenAPI document ---


async def test_the_document_is_served_without_a_token_and_names_every_route(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=True) as service:
        served = (await service.http.get("/openapi.json")).json()
        assert served == document()
    documented = {
        (method.upper(), re.sub(r"/core/\w+$", "/core/{verb}", path))
        for path, operations in served["paths"].items()
        for method in operations
    }
    routed = {
        (method, route.path_format)
        for route in service.app.routes
        for method in route.methods - {"HEAD"}
        if route.path != "/openapi.json"
    }
    named = re.compile(r"/core/(metrics|logs|lease|load)$")
    assert documented == {(method, named.sub("/core/{verb}", path)) for method, path in routed}
    for operations in served["paths"].values():
        for operation in operations.values():
            content = operation["responses"]["422"]["content"]["application/json"]
            assert content["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


@schemathesis.serializer("application/x-protobuf")
def _as_it_is(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def cases(mode: GenerationMode) -> list[Any]:
    """Return a few calls of every operation that do, or do not, follow the document; the same every time."""
    schema = schemathesis.openapi.from_dict(document())
    found: list[Any] = []
    for result in schema.get_all_operations():
        operation = result.ok()  # pyright: ignore[reportAttributeAccessIssue] - raises where it is no operation
        if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body):
            continue

        @settings(
            max_examples=EXAMPLES, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode))
        def collect(case: Any) -> None:
            found.append(case)

        collect()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_call_that_the_document_describes_or_forbids_breaks_the_service(
    tmp_path: Path, mode: GenerationMode
) -> None:
    made = await asyncio.to_thread(cases, mode)
    assert len(made) > 100
    async with rig(tmp_path) as service:
        job_id = await running(service, tmp_path)
        for case in made:
            place = {"database": "db", "schema": "public", "endpoint": "cortex-training"}
            if not case.operation.path.startswith("/api/v1/"):
                case.path_parameters = {**(case.path_parameters or {}), **place}
                if not case.operation.path.endswith(":cancel"):
                    case.path_parameters["job_id"] = job_id
            if case.query:
                case.query.pop("wait_s", None)  # waiting is no fault
            prepared = requests.Request(**case.as_transport_kwargs(base_url="http://service")).prepare()
            await ask(
                service, prepared.method or "", prepared.url or "", str(case.as_curl_command()),
                content=prepared.body, headers={"content-type": prepared.headers.get("content-type") or ""},
            )  # fmt: skip
        await still_works(service, job_id)


# --- frames ---


TARGETS = (
    "forward-backward",
    "generate",
    "generate-stream",
    "core/sample",
    "core/forward",
    "core/forward_backward",
)


def stock_frame(**config: TreeLike) -> bytes:
    ids = np.array([[5, 6, 7, 8]], np.int64)
    mask = np.array([[0, 0, 1, 1]], np.float32)
    return encode_frame(
        {
            "args": (),
            "kwargs": {"input_ids": ids, "attention_mask": np.ones_like(ids)},
            "context": {"input_ids": ids, "advantages": mask, "loss_mask": mask.astype(np.bool_),
                        "old_log_probs_shifted": -mask},
            "processing": {
                "loss_fn": "grpo", "config": {"eps_clip": 0.2, **config}, "post": ["compute_logprobs"],
            },
        }
    )  # fmt: skip


def valid_frames() -> list[bytes]:
    return [
        stock_frame(),
        generate_frame(),
        sample_frame(),
        encode_frame(pack_forward_request([sample()], temperature=1.0)),
        batch(sample(), sample(-1.0, 6, name="r1")),
    ]


def damaged(frame: bytes, rng: np.random.Generator) -> bytes:
    """Return a frame with a few bits flipped, cut short, or with bytes of its header replaced."""
    data = bytearray(frame)
    kind = rng.integers(4)
    if kind == 0:
        return bytes(data[: rng.integers(len(data))])
    end = len(data) if kind == 1 else 8 + int.from_bytes(data[:8], "little")
    for at in rng.integers(8 if kind == 3 else 0, end, rng.integers(1, 4)):
        data[at] = (
            data[at] ^ (1 << rng.integers(8)) if kind < 3 else rng.choice(list(b'0123456789"[]{},:tjdlu-.e'))
        )
    return bytes(data)


def bodies(seed: int, count: int) -> Iterator[bytes]:
    """Yield random bytes, damaged frames, and whole frames that are meant for another call."""
    rng = np.random.default_rng(seed)
    frames = valid_frames()
    for index in range(count):
        frame = frames[rng.integers(len(frames))]
        if index % 8 == 0:
            yield rng.bytes(int(rng.integers(0, 400)))
        elif index % 8 == 1:
            yield frame
        else:
            yield damaged(frame, rng)


async def send_frames(service: Rig, job_id: str, *, seed: int, count: int) -> None:
    for index, body in enumerate(bodies(seed, count)):
        target = TARGETS[index % len(TARGETS)]
        params = {"operation_id": f"{seed}-{index}", "wait_s": "5"} if "core" in target else {}
        if target == "core/forward_backward":
            state = await service.http.get(f"{PREFIX}/{job_id}/core")
            params["sequence"] = str(state.json()["next_sequence"])
        what = f"{target} with {body!r}"
        reply = await ask(service, "POST", f"{PREFIX}/{job_id}/{target}", what, content=body, params=params)
        request_id = (
            reply.json().get("request_id") if reply.headers["content-type"] == "application/json" else None
        )
        if request_id is not None:
            await poll(service, job_id, request_id, what)


async def poll(service: Rig, job_id: str, request_id: str, what: str) -> dict[str, Any]:
    """Wait for the outcome of a stock call; an error in it has the one shape too."""
    async with asyncio.timeout(REQUEST_S):
        while True:
            state = (await service.http.get(f"{PREFIX}/{job_id}/requests/{request_id}")).json()
            if state["status"] in ("completed", "failed", "cancelled"):
                break
            await asyncio.sleep(0.005)
    if "error" in state:
        error = ErrorBody.model_validate(state["error"])
        assert not A_LEAKED_EXCEPTION.search(error.message), f"{what}: {error.message}"
    return state


@pytest.mark.slow
async def test_damaged_frames_are_refused_and_leave_no_memory_behind(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await running(service, tmp_path)
        await send_frames(service, job_id, seed=0, count=120)  # what is loaded on first use
        before = resident_bytes(service, job_id)
        await send_frames(service, job_id, seed=1, count=400)
        growth = resident_bytes(service, job_id) - before
        assert growth <= MAX_GROWTH_BYTES, f"the engine grew by {growth} bytes"
        await still_works(service, job_id)


@pytest.mark.parametrize(("target", "operation"), [("forward-backward", "fwd-bwd"), ("generate", "generate")])
async def test_chunks_in_any_order_mixed_or_damaged_never_break_the_service(
    tmp_path: Path, target: str, operation: str
) -> None:
    rng = np.random.default_rng(2)
    frame = stock_frame(**{"x-note": "n" * 2000}) if target == "forward-backward" else generate_frame()
    async with rig(tmp_path) as service:
        job_id = await running(service, tmp_path)
        for round_ in range(12):
            chunks = split_frame(
                frame, kind=ChunkKind.REQUEST, operation=operation, max_bytes=8192 + 300,
                group_id=f"g{round_}", force=True,
            )  # fmt: skip
            order = [*rng.permutation(len(chunks)), *rng.integers(len(chunks), size=2)]
            for at in order:
                chunk = chunks[at] if rng.integers(4) else damaged(chunks[at], rng)
                await ask(service, "POST", f"{PREFIX}/{job_id}/{target}", content=chunk)
        await still_works(service, job_id)
