"""Requests that no client of ours sends: each is refused with its path, and nothing is left broken."""

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.integration.test_driver_death import on_a_socket
from tests.service.rig import PREFIX, Rig, batch, job_body, measured, rig, sample

from pilotage.service.chunk_groups import ChunkGroups
from pilotage.service.refusals import Refusal
from pilotage.wire.chunks import ChunkKind, split_frame
from pilotage.wire.core import ErrorBody, MetricPage
from pilotage.wire.frames import encode_frame


async def running(service: Rig) -> str:
    job_id = await service.create()
    assert await service.until(job_id, "running", timeout_s=120) == "running"
    return job_id


async def test_a_job_that_could_not_be_stored_is_refused_and_the_list_still_answers(tmp_path: Path) -> None:
    odd_training: list[dict[str, Any]] = [
        {"peft_config": {"r": 10**30}},
        {"max_seq_len": 10**30},
        {"optimizer": {"lr": float("inf")}},
        {"optimizer": {"params": 5}},
        {"gradient_clipping": float("inf")},
        {"x-ignored": 5},
    ]
    async with rig(tmp_path) as service:
        for change in odd_training:
            body = job_body()
            body["sub_job_configs"] = body["sub_job_configs"][:1]
            body["sub_job_configs"][0]["training_config"] |= change
            reply = await service.http.post(PREFIX, content=_json(body))
            assert (reply.status_code, reply.json()["code"]) == (422, "invalid"), (change, reply.text)
        assert (await service.http.get(PREFIX)).json() == {"jobs": []}


def _json(body: dict[str, Any]) -> bytes:
    """Return JSON with integers of any size and Infinity, which httpx would not write."""
    return json.dumps(body).encode()


async def test_a_path_or_method_that_no_route_takes_is_answered_in_the_one_shape(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await running(service)
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("DELETE", PREFIX, 405),
            ("GET", f"{PREFIX}/{job_id}/", 404),
            ("GET", f"{PREFIX}/{job_id}/requests/%00", 404),
            ("GET", f"{PREFIX}/{job_id}/requests/a%3Fb%23c%0A", 404),
            ("GET", f"{PREFIX}/{job_id}/core/operations/%0a", 404),
        ):
            reply = await service.http.request(method, path)
            assert reply.status_code == status, (path, reply.text)
            ErrorBody.model_validate_json(reply.content)


async def test_a_host_header_that_is_no_host_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await running(service)
        for host in ("[", "a b", "[::1", "x/../y", ""):
            reply = await service.http.get(f"{PREFIX}/{job_id}/core", headers={"host": host})
            assert reply.status_code == 200, (host, reply.text)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"operation_type": "tail-logs", "payload": [1]}, "payload"),
        ({"operation_type": "forward", "payload": {"payload_b64": "é"}}, "payload.payload_b64"),
        ({"operation_type": "weight-sync", "payload": {"bucket_size": 10**30}}, "source_sub_job_id"),
    ],
)
async def test_an_operation_with_an_odd_payload_is_refused(
    tmp_path: Path, body: dict[str, Any], path: str
) -> None:
    async with rig(tmp_path) as service:
        reply = await service.http.post(f"{PREFIX}/{await running(service)}/operation", content=_json(body))
        assert (reply.status_code, reply.json().get("path")) == (422, path)


async def test_sampling_parameters_of_another_kind_are_refused_with_their_path(tmp_path: Path) -> None:
    two = np.array([1, 2], np.int32)
    async with rig(tmp_path) as service:
        job_id = await running(service)
        for params in (
            {"stop_token_ids": 5},
            {"stop_token_ids": [[1]]},
            {"stop_token_ids": two},
            {"n": two},
            {"seed": "x"},
            {"seed": -1},
            {"top_k": two},
            {"logprobs": two},
            {"max_tokens": [1]},
        ):
            frame = encode_frame({"prompts": [two], "sampling_params": params})
            reply = await service.http.post(f"{PREFIX}/{job_id}/generate", content=frame)
            assert reply.status_code == 422, (params, reply.text)
            assert reply.json()["path"].startswith("sampling_params.0"), params


async def test_a_sequence_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        url = f"{PREFIX}/{await running(service)}/core/publish"
        reply = await service.http.post(url, params={"operation_id": "a", "sequence": "1" * 5000})
        assert (reply.status_code, reply.json()["path"]) == (422, "sequence")
        line = await service.http.post(url, params={"operation_id": "a\n", "sequence": "1"})
        assert (line.status_code, line.json()["path"]) == (422, "operation_id")


async def test_a_loss_that_overflowed_is_in_the_metrics_as_such(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await running(service)
        huge = batch(sample(3e38), sample(3e38, name="r1"))  # four trained tokens: their sum is over 3.4e38
        reply = await service.core(job_id, "forward_backward", operation_id="f", sequence=1, content=huge)
        assert measured(reply).loss == math.inf
        assert reply.headers["server-timing"].startswith("work;dur=")
        page = await service.http.get(f"{PREFIX}/{job_id}/core/metrics")
        assert orjson.loads(page.content)["records"][0]["values"]["loss"] == "Infinity"
        assert MetricPage.model_validate_json(page.content).records[0].values["loss"] == float("inf")


def test_unfinished_chunk_groups_share_one_bound_whatever_group_a_chunk_belongs_to() -> None:
    frame = encode_frame({"prompts": [np.zeros(4000, np.int64)]})  # 32 kB
    chunks = split_frame(frame, kind=ChunkKind.REQUEST, operation="generate", max_bytes=12_288, group_id="g")
    assert len(chunks) == 8
    groups = ChunkGroups(max_open_bytes=3 * (len(chunks[0]) + 1024) + 10)
    for chunk in (chunks[0], chunks[1], chunks[1], chunks[2]):
        assert groups.receive(chunk, operation="generate").frame is None
    with pytest.raises(Refusal, match="finish them"):
        groups.receive(chunks[3], operation="generate")


async def test_a_client_that_leaves_in_the_middle_of_a_request_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST {PREFIX} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{"
    with caplog.at_level(logging.INFO):
        async with rig(tmp_path) as service, on_a_socket(service) as url:
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(head.encode())
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
            assert (await service.http.get(f"{PREFIX}/capacity")).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
