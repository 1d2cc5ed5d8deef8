"""A job from its creation to its end: its id on disk, its start in time, its cancellation."""

import asyncio
import dataclasses
import logging
from pathlib import Path

import pytest
from tests.client.batches import job_body
from tests.client.faults import Fault, FaultyTransport
from tests.client.tiny_core import Refused, TinyCore

from pilotage.client import (
    Connection,
    CoreEngine,
    Http,
    JobPlan,
    Jobs,
    Patience,
    default_comment,
    open_engine,
)
from pilotage.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    JobFailedError,
    LostReplyError,
    NotFoundError,
    WaitTimeoutError,
)
from pilotage.types import AdamParams, LossConfig, SamplingParams
from pilotage.wire.core import ErrorCode

LOCAL = Connection(origin="http://127.0.0.1:1")
FAST = Patience(total_s=5.0, first_s=0.001, longest_s=0.002)


def plan(run_directory: Path | None = None, *, startup_timeout_s: float = 5.0, **changes: object) -> JobPlan:
    return JobPlan(
        body=job_body(**changes),  # pyright: ignore[reportArgumentType]
        loss=LossConfig(),
        adam=AdamParams(),
        sampling=SamplingParams(),
        startup_timeout_s=startup_timeout_s,
        run_directory=run_directory,
        patience=FAST,
    )


async def test_a_job_is_made_used_and_cancelled(tmp_path: Path) -> None:
    core = TinyCore()
    async with open_engine(LOCAL, plan(tmp_path), transport=FaultyTransport(core.app)) as engine:
        assert isinstance(engine, CoreEngine)
        assert (engine.max_context_tokens, engine.stop_token_ids) == (64, (0,))
        [job_id] = core.jobs
        assert core.jobs[job_id]["comment"] == default_comment()
        assert core.jobs[job_id]["x-pilotage"]["lease_s"] == 5.0
        assert core.status == "running"
    assert core.status == "cancelled"
    names = {name: (tmp_path / name).read_text() for name in ("job_id", "cortex_job_id")}
    assert names == dict.fromkeys(names, f"{job_id}\n")


async def test_the_id_is_on_disk_before_the_job_is_asked_for(tmp_path: Path) -> None:
    core = TinyCore()
    lost = [Fault.NONE] + [Fault.UNREACHABLE] * 100_000
    brief = dataclasses.replace(plan(tmp_path), patience=Patience(total_s=0.05, first_s=0.01))
    with pytest.raises(Exception, match="no reply to POST /"):
        async with open_engine(LOCAL, brief, transport=FaultyTransport(core.app, lost)):
            pass
    assert core.jobs == {}
    assert (tmp_path / "job_id").read_text().startswith("pilotage-")


@pytest.mark.parametrize("fault", [Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.TRUNCATED, Fault.LATE])
async def test_a_creation_without_a_reply_makes_one_job(fault: Fault) -> None:
    core = TinyCore()
    transport = FaultyTransport(core.app, [Fault.NONE, fault])
    async with open_engine(LOCAL, plan(), transport=transport):
        assert len(core.jobs) == 1
    assert core.status == "cancelled"


async def test_a_stock_server_is_not_asked_twice_to_make_a_job() -> None:
    core = TinyCore()
    transport = FaultyTransport(core.app, [Fault.LOST_REQUEST])
    async with Http(LOCAL, patience=FAST, transport=transport) as http:
        with pytest.raises(LostReplyError, match="it may still appear"):
            await Jobs(http).create(job_body(), on_id=lambda job_id: None, is_strict=False)
    assert core.jobs == {}


async def test_a_job_that_does_not_start_in_time_is_cancelled() -> None:
    core = TinyCore()
    core.polls_until_running = 1_000_000
    with pytest.raises(WaitTimeoutError, match=r"was still pending after 0\.3 s"):
        async with open_engine(LOCAL, plan(startup_timeout_s=0.3), transport=FaultyTransport(core.app)):
            pass
    assert core.status == "cancelled"
    assert core.leases


async def test_a_job_that_fails_to_start_says_why() -> None:
    core = TinyCore()
    core.status, core.reason = "failed", "engine: no such model"
    with pytest.raises(JobFailedError, match="is failed: engine: no such model") as caught:
        async with open_engine(LOCAL, plan(), transport=FaultyTransport(core.app)):
            pass
    assert caught.value.log_tail[-1] == "ERROR engine: out of memory"


async def test_an_interrupted_driver_cancels_its_job_at_once() -> None:
    core = TinyCore()
    is_open = asyncio.Event()

    async def drive() -> None:
        async with open_engine(LOCAL, plan(), transport=FaultyTransport(core.app)):
            is_open.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(drive())
    await is_open.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core.status == "cancelled"


async def test_the_job_of_a_killed_driver_is_cancelled_by_the_next(tmp_path: Path) -> None:
    core = TinyCore()
    core.jobs["left-behind"] = {}
    (tmp_path / "job_id").write_text("left-behind\n")
    transport = FaultyTransport(core.app)
    core.status = "pending"
    async with open_engine(LOCAL, plan(tmp_path), transport=transport):
        pass
    cancels = [call for call in transport.calls if call.endswith(":cancel")]
    assert cancels[0].endswith("/left-behind:cancel")
    assert (tmp_path / "job_id").read_text() != "left-behind\n"


async def test_a_refusal_to_create_keeps_its_class() -> None:
    core = TinyCore()
    core.jobs = _Full()
    with pytest.raises(CapacityError, match="9 of 8"):
        async with open_engine(LOCAL, plan(), transport=FaultyTransport(core.app)):
            pass


class _Full(dict[str, dict[str, object]]):
    """A service without room."""

    def __contains__(self, key: object) -> bool:
        raise Refused(ErrorCode.CAPACITY, "the job wants 9 of 8")


# --- what cannot be honoured is refused before anything is started ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lease_s": None, "x-pilotage": {}}, "names no stop_token_ids"),
        ({"lease_s": 5.0}, "lease_s is at least 60 here, got 5"),
    ],
)
async def test_a_plan_that_the_server_cannot_honour(changes: dict[str, object], says: str) -> None:
    core = TinyCore()
    core.capabilities = core.capabilities.model_copy(update={"min_lease_s": 60.0})
    with pytest.raises(ConfigError, match=says):
        async with open_engine(LOCAL, plan(**changes), transport=FaultyTransport(core.app)):  # pyright: ignore
            pass
    assert core.jobs == {}


async def test_a_service_of_another_version_is_refused_before_anything_is_started() -> None:
    core = TinyCore()
    core.capabilities = core.capabilities.model_copy(update={"version": 1})
    with pytest.raises(ConfigError, match="version 1 of the core, and this Pilotage version 2; run the same"):
        async with open_engine(LOCAL, plan(), transport=FaultyTransport(core.app)):
            pass
    assert core.jobs == {}


async def test_a_loss_that_the_server_does_not_have_is_named() -> None:
    core = TinyCore()
    core.capabilities = core.capabilities.model_copy(update={"losses": ("grpo",)})
    with pytest.raises(ConfigError, match=r"loss\.policy_loss is gspo; this service has grpo"):
        async with open_engine(LOCAL, plan(), transport=FaultyTransport(core.app)):
            pass


# --- jobs ---


async def test_jobs_are_found_by_status_and_comment() -> None:
    core = TinyCore()
    core.jobs |= {"a": {"comment": "mine"}, "b": {"comment": "other"}}
    core.status = "JOB_STATE_RUNNING"
    async with Http(LOCAL, transport=FaultyTransport(core.app)) as http:
        jobs = Jobs(http)
        assert [job.job_id for job in await jobs.find(comment="mine")] == ["a"]
        assert [job.job_id for job in await jobs.find(statuses=frozenset({"running"}))] == ["a", "b"]
        assert await jobs.find(statuses=frozenset({"failed"})) == []


@pytest.mark.parametrize("job_id", ["", "..", "a/b", "a\\b", "a\nb"])
async def test_an_id_that_is_a_path_goes_nowhere(job_id: str) -> None:
    transport = FaultyTransport(TinyCore().app)
    async with Http(LOCAL, transport=transport) as http:
        with pytest.raises(ConfigError, match="is no id"):
            await Jobs(http).get(job_id)
    assert transport.calls == []


async def test_a_job_that_ended_otherwise_cannot_be_cancelled_but_can_be_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = TinyCore()
    core.jobs["j"], core.status = {}, "failed"
    with caplog.at_level(logging.WARNING):
        async with Http(LOCAL, transport=FaultyTransport(core.app)) as http:
            with pytest.raises(ConflictError, match="the job has ended"):
                await Jobs(http).cancel("j")
            await Jobs(http).release("j")
            with pytest.raises(NotFoundError, match="no job k"):
                await Jobs(http).cancel("k")
            await Jobs(http).release("k")
    assert caplog.text == ""
