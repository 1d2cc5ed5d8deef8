"""The engine over the stock wire guards itself: what that wire would do twice, or drop, is not asked."""

import contextlib
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import pytest
from tests.client.batches import job_body, sample
from tests.client.faults import Fault, FaultyTransport
from tests.client.test_core import FAST, LOCAL
from tests.client.tiny_stock import TinyStock

from pilotage.client import Http, PlainEngine
from pilotage.client.plain import check_plain
from pilotage.errors import ConfigError, ContextExceededError, JobFailedError, SamplerError, TrainerError
from pilotage.types import AdamParams, LossConfig, SamplingParams, token_ids

ADAM = AdamParams(learning_rate=0.5)


@contextlib.asynccontextmanager
async def engine_on(stock: TinyStock, faults: Iterable[Fault] = ()) -> AsyncGenerator[PlainEngine]:
    transport = FaultyTransport(stock.app, faults)
    async with (
        Http(LOCAL, patience=FAST, transport=transport) as http,
        PlainEngine.attach(http, "j", body=job_body(lease_s=None)) as engine,
    ):
        yield engine


async def test_a_step_of_training_and_what_is_measured() -> None:
    stock = TinyStock()
    async with engine_on(stock) as engine:
        measured = await engine.forward_backward([sample("a"), sample("b", advantage=-0.5)], LossConfig())
        await engine.step(ADAM)
        assert await engine.publish() == 1
    # (2 x 1 - 2 x 0.5) / 2 rollouts = 0.5
    assert stock.weight == 1.0 - 0.5 * 0.5
    assert stock.operations == ["forward-backward", "step", "weight-sync", "reset-prefix-cache"]
    # The trainer says -1.25 where the sampler said -1.
    assert (measured.logprob_gap_mean, measured.logprob_gap_max) == (0.25, 0.25)
    assert (measured.loss, measured.clip_fraction, measured.trained_tokens) == (-0.5, 0.125, 4)
    assert stock.bodies[0]["payload"] == {
        "source_sub_job_id": "j:training:0",
        "target_sub_job_ids": ["j:sampling:0"],
        "weight_format": "hf",
    }


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.TRUNCATED, Fault.TWICE, Fault.LATE, Fault.BUSY])
async def test_a_gradient_is_computed_once_whatever_happens_to_its_chunks(fault: Fault) -> None:
    stock = TinyStock()
    async with engine_on(stock, [fault]) as engine:
        await engine.forward_backward([sample()], LossConfig())
    assert stock.operations == ["forward-backward"]


async def test_a_server_that_lost_the_chunks_gets_them_again() -> None:
    stock = TinyStock()
    stock.forgets_chunks_once = True
    async with engine_on(stock) as engine:
        await engine.forward_backward([sample()], LossConfig())
    assert stock.operations == ["forward-backward"]


async def test_a_second_gradient_would_replace_the_first_and_is_refused() -> None:
    stock = TinyStock()
    async with engine_on(stock) as engine:
        await engine.forward_backward([sample()], LossConfig())
        with pytest.raises(TrainerError, match="replaces a gradient by the next one"):
            await engine.forward_backward([sample()], LossConfig())
        await engine.discard()
        with pytest.raises(TrainerError, match="there is no gradient to apply"):
            await engine.step(ADAM)
        await engine.forward_backward([sample()], LossConfig())
        await engine.step(ADAM)
        with pytest.raises(TrainerError, match="there is no gradient to apply"):
            await engine.step(ADAM)
    assert stock.steps == 1


async def test_a_step_whose_reply_was_lost_is_proven_by_a_checkpoint() -> None:
    stock = TinyStock()
    # forward-backward and its poll, then the step
    async with engine_on(stock, [Fault.NONE, Fault.NONE, Fault.LOST_REPLY]) as engine:
        await engine.forward_backward([sample()], LossConfig())
        result = await engine.step(ADAM)
    assert (stock.steps, result.num_backwards) == (1, 1)
    assert stock.operations == ["forward-backward", "step", "save"]
    assert stock.checkpoints == []  # it was made for the proof alone


async def test_a_step_that_cannot_be_proven_stops_the_run_and_is_not_sent_again() -> None:
    stock = TinyStock()
    async with engine_on(stock, [Fault.NONE, Fault.NONE, Fault.LOST_REQUEST]) as engine:
        await engine.forward_backward([sample()], LossConfig())
        with pytest.raises(TrainerError, match="resume the run from its newest checkpoint"):
            await engine.step(ADAM)
    assert stock.steps == 0


async def test_a_weight_sync_without_a_reply_is_not_repeated() -> None:
    stock = TinyStock()
    async with engine_on(stock, [Fault.LOST_REPLY]) as engine:
        with pytest.raises(TrainerError, match="no reply to POST /j/operation"):
            await engine.publish()
    assert stock.operations == ["weight-sync"]


async def test_a_completion_has_the_log_probs_of_its_own_tokens() -> None:
    stock = TinyStock()
    params = SamplingParams(max_tokens=100, seed=3)
    async with engine_on(stock) as engine:
        first = await engine.sample(token_ids([1, 2]), params, session_id="s", turn_index=0)
        await engine.sample(token_ids([1, 2]), params, session_id="s", turn_index=1)
        await engine.sample(token_ids([1, 2]), params, session_id="other", turn_index=0)
    assert first.token_ids.tolist() == [5, 6, 0]
    assert first.logprobs.tolist() == [-2.5, -3.0, 0.0]
    assert first.weights_versions.tolist() == [0, 0, 0]
    wishes = [wish["sampling_params"] for wish in stock.wishes]
    assert (wishes[0]["max_tokens"], wishes[0]["stop_token_ids"]) == (62, [0])
    assert wishes[0]["seed"] == wishes[2]["seed"] != wishes[1]["seed"]
    assert [wish["routing_key"] for wish in stock.wishes] == ["s", "s", "other"]


async def test_a_prompt_without_room_is_refused_here() -> None:
    async with engine_on(TinyStock()) as engine:
        with pytest.raises(ContextExceededError, match="64 tokens leaves no room in 64"):
            await engine.sample(token_ids(range(64)), SamplingParams(), session_id="s", turn_index=0)


async def test_a_completion_whose_reply_was_lost_may_be_sampled_again_by_the_caller() -> None:
    stock = TinyStock()
    async with engine_on(stock, [Fault.LOST_REPLY]) as engine:
        with pytest.raises(SamplerError, match="no reply to POST /j/generate") as caught:
            await engine.sample(token_ids([1]), SamplingParams(), session_id="s", turn_index=0)
    assert caught.value.retryable
    assert stock.operations == ["generate"]


async def test_weights_are_counted_here_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    stock = TinyStock()
    async with engine_on(stock) as engine:
        await engine.forward_backward([sample()], LossConfig())
        await engine.step(ADAM)
        await engine.publish()
        await engine.save(tmp_path / "published")
        await engine.forward_backward([sample()], LossConfig())
        await engine.step(ADAM)
        await engine.save(tmp_path / "not-published")
    async with engine_on(stock) as engine:
        await engine.load(tmp_path / "published")
        assert await engine.publish() == 1  # the same weights, the same version
        await engine.load(tmp_path / "not-published")
        assert await engine.publish() == 2
    assert stock.bodies[-2]["operation_type"] == "weight-sync"
    assert [body["checkpoint_id"] for body in stock.bodies if "checkpoint_id" in body] == ["cp_0", "cp_1"]


async def test_a_job_that_ended_is_named_by_the_call_that_failed() -> None:
    stock = TinyStock()
    async with engine_on(stock, [Fault.NONE, Fault.NONE, Fault.LOST_REQUEST]) as engine:
        await engine.forward_backward([sample()], LossConfig())
        stock.status = "terminated"
        with pytest.raises(JobFailedError, match="job j is terminated: idle_timeout"):
            await engine.publish()


async def test_the_stock_wire_scores_nothing() -> None:
    async with engine_on(TinyStock()) as engine:
        with pytest.raises(TrainerError, match="cannot score 1 samples"):
            await engine.forward([sample()], temperature=1.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": LossConfig(temperature=0.8)}, r"loss\.temperature: a stock trainer scores at 1\.0"),
        ({"sampling": SamplingParams(temperature=0.8)}, r"sampling\.temperature is 0\.8"),
        ({"adam": AdamParams(beta2=0.95)}, r"optimizer\.beta2 is 0\.999 in the job and 0\.95 in the step"),
        ({"adam": AdamParams(max_grad_norm=0.5)}, r"optimizer\.max_grad_norm is 1\.0 in the job"),
    ],
)
def test_what_the_wire_cannot_honour_is_refused_at_the_start(changes: dict[str, object], says: str) -> None:
    asked = {"loss": LossConfig(), "adam": AdamParams(), "sampling": SamplingParams()} | changes
    with pytest.raises(ConfigError, match=says):
        check_plain(job_body(lease_s=None), **asked)  # pyright: ignore[reportArgumentType]
