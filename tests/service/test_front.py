"""What a client may ask: owners apart, bodies closed, ids that are no paths, errors in one shape."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.service.rig import PREFIX, Rig, batch, job_body, measured, rig, step_body

from pilotage.service.tokens import create_token
from pilotage.wire.chunks import ChunkKind, split_frame
from pilotage.wire.frames import encode_frame


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_a_job_of_another_token_cannot_be_seen_or_touched(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=True) as service:
        mine, theirs = (bearer(create_token(service.store, name)) for name in ("ann", "bob"))
        created = await service.http.post(PREFIX, json=job_body(job_id="secret"), headers=mine)
        assert created.status_code == 200
        calls = [
            ("GET", ""), ("POST", ":cancel"), ("GET", "/checkpoints"), ("GET", "/core"),
            ("POST", "/core/lease"), ("POST", "/core/step?operation_id=a&sequence=1"), ("POST", "/step"),
            ("POST", "/operation"), ("GET", "/requests/x"), ("GET", "/core/logs"), ("GET", "/core/metrics"),
            ("GET", "/experiment-run"), ("DELETE", "/checkpoints/one"), ("POST", "/checkpoints/one:export"),
            ("POST", "/load"),
        ]  # fmt: skip
        for method, path in calls:
            reply = await service.http.request(
                method, f"{PREFIX}/secret{path}", headers=theirs, json={} if method == "POST" else None
            )
            assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), (method, path)
            assert "ann" not in reply.text
            nobody = await service.http.request(method, f"{PREFIX}/secret{path}")
            assert nobody.status_code == 401, (method, path)
        assert (await service.http.get(PREFIX, headers=theirs)).json() == {"jobs": []}
        assert (await service.http.get("/api/v2/cortex-training", headers=theirs)).json()["jobs"] == []
        assert len((await service.http.get(PREFIX, headers=mine)).json()["jobs"]) == 1
        elsewhere = PREFIX.replace("/db/", "/other/")
        assert (await service.http.get(f"{elsewhere}/secret", headers=mine)).status_code == 404


async def test_a_checkpoint_of_another_owner_cannot_be_loaded(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=True) as service:
        mine, theirs = (bearer(create_token(service.store, name)) for name in ("ann", "bob"))
        for name, headers in (("a", mine), ("b", theirs)):
            service.http.headers.update(headers)
            await service.running(job_id=name)
        service.http.headers.update(mine)
        await service.core("a", "save", operation_id="s", sequence=1, json={"checkpoint_id": "one"})
        service.http.headers.update(theirs)
        load = {"checkpoint_id": "one", "source_job_id": "a"}
        strict = await service.core("b", "load", operation_id="l", sequence=1, json=load)
        stock = await service.http.post(f"{PREFIX}/b/load", json=load)
        assert (strict.status_code, stock.status_code) == (404, 404)
        forged = {"x-pilotage-source": str(tmp_path / "jobs" / "a")}
        own = {"checkpoint_id": "one"}
        reply = await service.core("b", "load", operation_id="l", sequence=1, json=own, headers=forged)
        assert reply.status_code == 404


@pytest.mark.parametrize(
    "job_id", ["..", "a/../b", "%2e%2e", "a b", "", ".hidden", "a" * 129, "x\u0000y", "é"]
)
async def test_job_ids_that_could_be_paths_are_refused_and_unknown_ones_are_not_found(
    tmp_path: Path, job_id: str
) -> None:
    async with rig(tmp_path) as service:
        created = await service.http.post(PREFIX, json=job_body(job_id=job_id))
        assert created.status_code == 422
        assert created.json()["path"] == "job_id"
        assert not (tmp_path / "jobs").exists()
        reply = await service.http.get(f"{PREFIX}/nobody")
        assert reply.status_code == 404


@pytest.mark.parametrize("checkpoint_id", ["..", "../job.json", "a/b", "%2e%2e%2fjob", "a" * 65, "x.json"])
async def test_checkpoint_ids_that_could_be_paths_are_refused(tmp_path: Path, checkpoint_id: str) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        saved = await service.core(
            job_id, "save", operation_id="s", sequence=1, json={"checkpoint_id": checkpoint_id}
        )
        assert (saved.status_code, saved.json()["path"]) == (422, "checkpoint_id")
        for method, suffix in (("DELETE", ""), ("POST", ":export"), ("GET", "/files/weights.json")):
            reply = await service.http.request(
                method, f"{PREFIX}/{job_id}/checkpoints/{checkpoint_id}{suffix}"
            )
            assert reply.status_code in (404, 405, 422), (method, reply.text)
        assert (tmp_path / "jobs" / job_id / "job.json").exists()


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"hardwear": "H200"}, "hardwear", "unknown key hardwear"),
        ({"idle_timeout_seconds": 10}, "idle_timeout_seconds", "must lie in 300..604800"),
        ({"hardware": "A100"}, "hardware", "'H200', 'B200' or 'B300'"),
        ({"sub_job_configs": []}, "sub_job_configs", "at least 1 item"),
        ({"x-pilotage": {"lease_s": 1}}, "x-pilotage.lease_s", "greater than or equal to 5"),
    ],
)
async def test_a_create_body_is_closed_and_the_refusal_names_the_place(
    tmp_path: Path, change: dict[str, Any], path: str, message: str
) -> None:
    async with rig(tmp_path) as service:
        reply = await service.http.post(PREFIX, json=job_body(**change))
        assert reply.status_code == 422
        assert reply.json()["path"] == path
        assert message in reply.json()["message"]
        accepted = await service.http.post(PREFIX, json=job_body() | {"x-note": {"mine": 1}})
        assert accepted.status_code == 200


async def test_training_keys_that_tune_speed_are_named_as_ignored_and_typos_are_refused(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as service:
        body = job_body()
        body["sub_job_configs"][0]["training_config"]["attn_implementation"] = "flash_attention_3"
        job_id = (await service.http.post(PREFIX, json=body)).json()["job_id"]
        shown = (await service.http.get(f"{PREFIX}/{job_id}")).json()["sub_jobs"][0]["training_config"]
        assert shown["x-ignored"] == ["attn_implementation"]
        body["sub_job_configs"][0]["training_config"]["max_seq_length"] = 7
        reply = await service.http.post(PREFIX, json=body)
        assert reply.status_code == 422
        assert reply.json()["path"] == "sub_job_configs.0.training_config.max_seq_length"


async def test_a_model_outside_the_models_directory_is_not_found(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "config.json").write_text("{}")
        for name in ("../outside", str(outside), "policy/../../outside", "none"):
            reply = await service.http.post(PREFIX, json=job_body(name))
            assert (reply.status_code, reply.json()["path"]) == (422, "sub_job_configs.0.model_name")


async def test_the_strict_core_says_what_is_missing_and_where(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        url = f"{PREFIX}/{job_id}/core"
        cases: list[tuple[dict[str, Any], str]] = [
            ({"params": {"sequence": "1"}, "json": step_body()}, "operation_id"),
            ({"params": {"operation_id": "a"}, "json": step_body()}, "sequence"),
            ({"params": {"operation_id": "a", "sequence": "0"}, "json": step_body()}, "sequence"),
            ({"params": {"operation_id": "a", "sequence": "1", "wait_s": "nan"}, "json": {}}, "wait_s"),
        ]
        for request, path in cases:
            reply = await service.http.post(f"{url}/step", **request)
            assert (reply.status_code, reply.json()["path"]) == (422, path)
        wrong = await service.core(job_id, "step", operation_id="a", sequence=1, json={"learning_rat": 1})
        assert (wrong.status_code, wrong.json()["path"]) == (422, "learning_rat")
        some = await service.core(job_id, "step", operation_id="e", sequence=2, json={"learning_rate": 1})
        assert (some.status_code, some.json()["path"]) == (422, "beta1")
        no_frame = await service.core(job_id, "sample", operation_id="b", content=b"\x80\x04pickle")
        assert (no_frame.status_code, no_frame.json()["code"]) == (422, "invalid")
        unknown = await service.core(job_id, "stop", operation_id="c")
        assert unknown.status_code == 404
        early = await service.core(
            await service.create(comment="never opens"), "publish", operation_id="d", sequence=1
        )
        assert (early.status_code, early.json()["retryable"]) == (409, True)


async def test_a_body_over_the_cap_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        too_large = await service.http.post(
            f"{PREFIX}/{job_id}/core/forward_backward?operation_id=a&sequence=1",
            content=b"x",
            headers={"content-length": str(61 * 2**20)},
        )
        assert (too_large.status_code, too_large.json()["code"]) == (413, "too_large")


async def test_a_discarded_gradient_is_gone_and_a_repeated_discard_is_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        await service.core(job_id, "forward_backward", operation_id="f1", sequence=1, content=batch())
        first = await service.core(job_id, "discard", operation_id="d", sequence=2, json={})
        await service.core(job_id, "forward_backward", operation_id="f2", sequence=3, content=batch())
        again = await service.core(job_id, "discard", operation_id="d", sequence=2, json={})
        assert [(reply.status_code, reply.json()) for reply in (first, again)] == [(200, {})] * 2
        step = await service.core(job_id, "step", operation_id="s", sequence=4, json=step_body(0.25))
        # One batch of two tokens with advantage 1: the one before the discard is not in it, the one after is.
        assert step.json() == {"grad_norm": 2.0, "learning_rate": 0.25, "num_backwards": 1}


async def test_gradients_accumulate_until_step_and_metrics_are_kept_with_a_cursor(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        for number in (1, 2):
            reply = await service.core(
                job_id, "forward_backward", operation_id=f"f{number}", sequence=number, content=batch()
            )
            assert measured(reply).trained_tokens == 2
            assert measured(reply).trainer_logprobs_n is not None
        step = await service.core(job_id, "step", operation_id="s", sequence=3, json=step_body(0.25))
        # Two batches of two tokens with advantage 1.
        assert step.json() == {"grad_norm": 4.0, "learning_rate": 0.25, "num_backwards": 2}
        page = (await service.http.get(f"{PREFIX}/{job_id}/core/metrics")).json()
        assert [record["verb"] for record in page["records"]] == [
            "forward_backward",
            "forward_backward",
            "step",
        ]
        assert page["records"][2]["values"]["grad_norm"] == 4.0
        rest = (await service.http.get(f"{PREFIX}/{job_id}/core/metrics?cursor=2")).json()
        assert [record["cursor"] for record in rest["records"]] == [2]
        assert rest["next_cursor"] == 3
        empty = await service.core(job_id, "step", operation_id="t", sequence=4, json=step_body())
        assert (empty.status_code, empty.json()["code"]) == (400, "trainer_error")


async def test_stock_calls_are_in_the_metric_series_with_their_figures(tmp_path: Path) -> None:
    ids = np.arange(1, 9).reshape(2, 4)
    context = {
        "advantages": np.ones((2, 4), np.float32),
        "loss_mask": np.ones((2, 4), np.bool_) & (np.arange(4) < 3),
        "old_log_probs_shifted": np.full((2, 4), -1, np.float32),
    }
    tree = {"args": (), "kwargs": {"input_ids": ids}, "context": context, "processing": {"loss_fn": "grpo"}}
    chunks = split_frame(encode_frame(tree), kind=ChunkKind.REQUEST, operation="fwd-bwd", force=True)
    async with rig(tmp_path) as service:
        job_id = await service.running()
        calls = (("forward-backward", chunks[0]), ("step", b"{}"))
        for path, body in calls:
            accepted = await service.http.post(f"{PREFIX}/{job_id}/{path}", content=body)
            url = f"{PREFIX}/{job_id}/requests/{accepted.json()['request_id']}"
            async with asyncio.timeout(20):
                while (await service.http.get(url)).json()["status"] in ("pending", "running"):  # noqa: ASYNC110 - a poll
                    await asyncio.sleep(0.02)
        records = (await service.http.get(f"{PREFIX}/{job_id}/core/metrics")).json()["records"]
        assert [record["verb"] for record in records] == ["forward-backward", "step"]
        assert records[0]["values"]["trained_tokens"] == 6.0
        assert records[1]["values"]["num_backwards"] == 1.0


async def _list(service: Rig, query: str) -> list[str]:
    return [job["job_id"] for job in (await service.http.get(f"{PREFIX}?{query}")).json()["jobs"]]


async def test_lists_are_filtered_by_states_and_groups_of_states(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        await service.running(job_id="a")
        await service.running(job_id="b")
        await service.http.post(f"{PREFIX}/a:cancel")
        assert await _list(service, "") == ["a", "b"]
        assert await _list(service, "status=running") == ["b"]
        assert await _list(service, "status=active") == ["b"]
        assert await _list(service, "status=done") == ["a"]
        assert await _list(service, "status=cancelled,running") == ["a", "b"]
        wrong = await service.http.get(f"{PREFIX}?status=runing")
        assert (wrong.status_code, wrong.json()["path"]) == (422, "status")
        page = (await service.http.get("/api/v2/cortex-training?limit=1")).json()
        assert [job["job_id"] for job in page["jobs"]] == ["a"]
        following = await service.http.get(
            f"/api/v2/cortex-training?limit=1&page_token={page['next_page_token']}"
        )
        assert [job["job_id"] for job in following.json()["jobs"]] == ["b"]


async def test_every_reply_has_an_id_and_tokens_are_in_no_file_but_as_digests(tmp_path: Path) -> None:
    async with rig(tmp_path, with_auth=True) as service:
        token = create_token(service.store, "ann")
        for headers in ({}, bearer(token), bearer("plt_wrong")):
            reply = await service.http.get(PREFIX, headers=headers)
            assert len(reply.headers["x-snowflake-request-id"]) == 32
            assert token not in reply.text
        service.http.headers.update(bearer(token))
        await service.running()
    assert _files_with(token, tmp_path) == []


def _files_with(text: str, directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]
