"""States of a job: who gets GPUs when, and every way in which a job ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.service.rig import PREFIX, Rig, batch, job_body, rig, step_body

from pilotage.processes import ProcessIdentity, is_running


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def process_of(service: Rig, job_id: str) -> ProcessIdentity:
    address = service.jobs._jobs[job_id].address
    assert address is not None
    return address.process


async def capacity(service: Rig) -> tuple[int, int, int]:
    reply = (await service.http.get(f"{PREFIX}/capacity")).json()
    return reply["in_use_gpus"], reply["pending_gpus"], reply["available_gpus"]


async def test_a_job_goes_from_pending_to_running_and_cancelling_frees_its_gpus(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.create(comment="mine")
        assert await capacity(service) == (2, 0, 6)
        assert await service.until(job_id, "running") == "running"
        engine = process_of(service, job_id)
        job = (await service.http.get(f"{PREFIX}/{job_id}")).json()
        assert job["comment"] == "mine"
        assert job["submitted_by"] == "local"
        assert [s["sub_job_id"] for s in job["sub_jobs"]] == [f"{job_id}:training:0", f"{job_id}:sampling:0"]
        for _ in range(2):  # again is fine
            assert (await service.http.post(f"{PREFIX}/{job_id}:cancel")).status_code == 200
        job = (await service.http.get(f"{PREFIX}/{job_id}")).json()
        assert (job["status"], job["reason"]) == ("cancelled", "cancelled by its owner")
        assert await capacity(service) == (0, 0, 8)
        assert not os.path.exists(f"/proc/{engine.pid}")  # noqa: ASYNC240 - not even as a zombie


async def test_jobs_wait_in_order_and_a_small_one_does_not_overtake(tmp_path: Path) -> None:
    async with rig(tmp_path, capacity=8) as service:
        first = await service.running(job_id="first", sub_job_configs=job_body(n_gpus=3)["sub_job_configs"])
        second = await service.create(job_id="second", sub_job_configs=job_body(n_gpus=2)["sub_job_configs"])
        third = await service.create(job_id="third")
        assert await capacity(service) == (6, 6, 0)
        for waiting in (second, third):
            assert (await service.http.get(f"{PREFIX}/{waiting}")).json()["status"] == "pending"
        await service.http.post(f"{PREFIX}/{first}:cancel")
        assert await service.until(second, "running") == "running"
        assert await service.until(third, "running") == "running"
        too_much = await service.http.post(PREFIX, json=job_body(n_gpus=5))
        assert too_much.status_code == 429
        assert too_much.json()["message"] == "the job wants 10 H200; this service has 8 in all"


@pytest.mark.parametrize(
    ("comment", "reason"),
    [
        ("fails to open", "engine: the weights are of another architecture"),
        ("dies while opening", "engine_lost: CUDA error: out of memory"),
    ],
)
async def test_an_engine_that_cannot_open_fails_its_job_with_the_reason(
    tmp_path: Path, comment: str, reason: str
) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.create(comment=comment)
        assert await service.until(job_id, "running") == "failed"
        assert (await service.http.get(f"{PREFIX}/{job_id}")).json()["reason"] == reason
        assert await capacity(service) == (0, 0, 8)
        other = await service.running(comment="another job is untouched")
        assert other != job_id


async def test_an_engine_that_dies_at_work_fails_its_job_and_the_next_call_shows_its_log(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as service:
        job_id, other = await service.running(), await service.running()
        (tmp_path / "jobs" / job_id / "fault").write_text("die")
        lost = await service.core(job_id, "step", operation_id="a", sequence=1, json=step_body())
        assert lost.status_code == 503
        assert lost.json()["retryable"]
        assert await service.until(job_id) == "failed"
        gone = await service.core(job_id, "step", operation_id="a", sequence=1, json=step_body())
        assert (gone.status_code, gone.json()["code"]) == (410, "engine_lost")
        assert "the engine is open" in " ".join(gone.json()["log_tail"])
        kept = await service.core(other, "forward_backward", operation_id="b", sequence=1, content=batch())
        assert kept.status_code == 200


async def test_timeouts_end_jobs_that_wait_idle_or_lose_their_driver(tmp_path: Path) -> None:
    clock = Clock()
    async with rig(tmp_path, capacity=4, clock=clock) as service:
        leased = await service.running(**{"x-pilotage": {"lease_s": 30}})
        kept = await service.running(**{"x-pilotage": {"lease_s": 30, "on_lost": "keep"}})
        waiting = await service.create(pending_timeout_seconds=300)
        clock.now += 20
        renewed = await service.http.post(f"{PREFIX}/{leased}/core/lease", json={"lease_s": 30})
        assert renewed.json() == {"expires_in_s": 30.0, "status": "running"}
        clock.now += 20
        await asyncio.sleep(0.5)
        for job_id in (leased, kept):
            assert (await service.http.get(f"{PREFIX}/{job_id}")).json()["status"] == "running"
        clock.now += 11
        assert await service.until(leased) == "cancelled"
        lost = (await service.http.get(f"{PREFIX}/{leased}")).json()
        assert lost["reason"] == "lease_expired: its driver is gone"
        assert await service.until(waiting, "running") == "running"
        late = await service.create(pending_timeout_seconds=300)
        clock.now += 301
        assert await service.until(late) == "failed"
        assert (await service.http.get(f"{PREFIX}/{late}")).json()["reason"] == "pending_timeout"
        clock.now += 1800
        assert await service.until(kept) == "terminated"
        assert (await service.http.get(f"{PREFIX}/{kept}")).json()["reason"] == "idle_timeout"


async def test_a_front_that_was_killed_finds_its_engines_and_their_outcomes_again(tmp_path: Path) -> None:
    async with rig(tmp_path, ends_jobs=False) as service:
        job_id = await service.running()
        engine = process_of(service, job_id)
        first = await service.core(job_id, "forward_backward", operation_id="a", sequence=1, content=batch())
        assert first.status_code == 200
    assert is_running(engine)
    async with rig(tmp_path) as service:
        assert process_of(service, job_id) == engine
        again = await service.core(job_id, "forward_backward", operation_id="a", sequence=1, content=batch())
        assert again.content == first.content
        step = await service.core(job_id, "step", operation_id="b", sequence=2, json=step_body())
        assert step.json()["num_backwards"] == 1
    assert not is_running(engine)


async def test_a_front_that_was_killed_reports_engines_that_died_meanwhile(tmp_path: Path) -> None:
    async with rig(tmp_path, ends_jobs=False) as service:
        job_id = await service.running()
        engine = process_of(service, job_id)
    os.killpg(engine.pid, signal.SIGKILL)
    async with rig(tmp_path) as service:
        job = (await service.http.get(f"{PREFIX}/{job_id}")).json()
        assert (job["status"], job["reason"]) == ("failed", "engine_lost: it died while the service was down")
        assert await capacity(service) == (0, 0, 8)


async def test_a_job_whose_creation_was_cut_short_is_there_whole_or_its_id_is_free(tmp_path: Path) -> None:
    async with rig(tmp_path, ends_jobs=False) as service:
        known = service.jobs._jobs[await service.create()]
        recorded = known.to_json().replace(known.id, "recorded").replace(str(known.status), "placing")
        service.store.put_job("recorded", known.created_at, recorded)  # and no more: killed here
        service.store.close()  # killed before it was recorded
        reply = await service.http.post(PREFIX, json=job_body(job_id="unrecorded"))
        assert reply.status_code == 500
        assert "unrecorded" not in service.jobs._jobs
    async with rig(tmp_path) as service:
        assert await service.until("recorded", "running") == "running"
        assert await service.running(job_id="unrecorded") == "unrecorded"


async def test_ended_jobs_and_their_checkpoints_outlive_a_restart(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.running()
        await service.core(job_id, "save", operation_id="s", sequence=1, json={"checkpoint_id": "one"})
    async with rig(tmp_path) as service:
        job = (await service.http.get(f"{PREFIX}/{job_id}")).json()
        assert (job["status"], job["reason"]) == ("terminated", "the service was stopped")
        found = (await service.http.get(f"{PREFIX}/{job_id}/checkpoints")).json()["checkpoints"]
        assert [c["checkpoint_id"] for c in found] == ["one"]
        other = await service.running(
            sub_job_configs=[
                {**s, "source_checkpoint_info": {"checkpoint_id": "one", "source_job_id": job_id}}
                for s in job_body()["sub_job_configs"]
            ]
        )
        assert (await service.http.get(f"{PREFIX}/{other}/core")).json()["weights_version"] == 1


async def test_cancelling_while_the_engine_opens_ends_it_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        job_id = await service.create(comment="never opens")
        assert await service.until(job_id, "initializing") == "initializing"
        engine = process_of(service, job_id)
        async with asyncio.timeout(5):
            await service.http.post(f"{PREFIX}/{job_id}:cancel")
        assert not is_running(engine)
        failed = await service.create(comment="fails to open")
        await service.until(failed)
        conflict = await service.http.post(f"{PREFIX}/{failed}:cancel")
        assert conflict.status_code == 409
