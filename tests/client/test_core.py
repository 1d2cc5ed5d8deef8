"""The engine over the strict core: each call is carried out once, whatever the network does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.batches import sample
from tests.client.faults import Fault, FaultyTransport
from tests.client.tiny_core import PREFIX, Refused, TinyCore, adam

from pilotage.client import Connection, CoreEngine, Http, Patience
from pilotage.errors import (
    ConfigError,
    ConflictError,
    ContextExceededError,
    JobFailedError,
    LostReplyError,
    SamplerError,
    TrainerError,
    WeightsChangingError,
)
from pilotage.types import Denominators, LossConfig, SamplingParams, token_ids
from pilotage.wire.core import ErrorCode

LOCAL = Connection(origin="http://127.0.0.1:1")
FAST = Patience(total_s=5.0, first_s=0.001, longest_s=0.002)
PARAMS = SamplingParams(max_tokens=3)


@contextlib.asynccontextmanager
async def engine_on(
    core: TinyCore,
    faults: Iterable[Fault] = (),
    *,
    lease_s: float | None = None,
    patience: Patience = FAST,
) -> AsyncGenerator[CoreEngine]:
    """Attach to a running job; faults start afterwards, and spare leases."""
    core.jobs["j"], core.status = {}, "running"
    transport = FaultyTransport(
        core.app,
        faults,
        spares=lambda request: request.url.path in (f"{PREFIX}/j/core", f"{PREFIX}/j/core/lease"),
    )
    async with (
        Http(LOCAL, patience=patience, transport=transport) as http,
        CoreEngine.attach(
            http, "j", capabilities=core.capabilities, stop_token_ids=(0,), lease_s=lease_s
        ) as engine,
    ):
        yield engine


async def a_small_run(engine: CoreEngine, directory: Path) -> list[object]:
    """Call every verb, some twice; returns what they answered."""
    samples = [sample("a", advantage=2.0), sample("b", advantage=-0.5)]
    answers: list[object] = []
    for step in range(2):
        answers.append(await engine.forward_backward(samples, LossConfig()))
        answers.append(await engine.forward_backward(samples[:1], LossConfig()))
        answers.append(await engine.step(adam(0.5 / (step + 1))))
        answers.append(await engine.publish())
        completion = await engine.sample(token_ids([1, 2]), PARAMS, session_id="s", turn_index=step)
        answers.append((completion.token_ids.tolist(), completion.weights_versions.tolist()))
    await engine.save(directory / "step-0002")
    await engine.load(directory / "step-0002")
    return answers


# sum of advantages / rollouts: 2 tokens each, (4 - 1) / 2 + 4 / 1 = 5.5 a step
WEIGHT = 1.0 - 0.5 * 5.5 - 0.25 * 5.5
VERBS = ["forward_backward", "forward_backward", "step", "publish", "sample"] * 2 + ["save", "load"]


async def test_a_run_over_a_clean_network_calls_every_verb_in_order(tmp_path: Path) -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        await a_small_run(engine, tmp_path)
    assert core.weight == WEIGHT
    assert core.executed == VERBS


@given(faults=st.lists(st.sampled_from(list(Fault)), max_size=25))
@settings(max_examples=15, deadline=None)
def test_whatever_is_lost_repeated_or_late_every_call_is_carried_out_once(
    tmp_path_factory: pytest.TempPathFactory, faults: list[Fault]
) -> None:
    async def run(spoiled: Iterable[Fault]) -> tuple[TinyCore, list[object]]:
        core = TinyCore()
        async with engine_on(
            core, spoiled, patience=Patience(total_s=30.0, first_s=0.0, longest_s=0.0)
        ) as engine:
            return core, await a_small_run(engine, tmp_path_factory.mktemp("run"))

    # Five unreadable replies in a row are the server's fault, not the network's.
    garbled = [f for i, f in enumerate(faults) if f is not Fault.GARBLED or i % 3 == 0]
    spoiled_core, spoiled = asyncio.run(run(garbled))
    clean_core, clean = asyncio.run(run(()))
    assert spoiled_core.weight == clean_core.weight
    assert spoiled_core.executed == VERBS
    assert spoiled == clean


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
async def test_one_fault_at_each_call_in_turn_changes_no_result(tmp_path: Path, fault: Fault) -> None:
    for place in range(len(VERBS)):
        core = TinyCore()
        directory = tmp_path / f"{fault}-{place}"
        directory.mkdir()
        async with engine_on(core, [Fault.NONE] * place + [fault]) as engine:
            await a_small_run(engine, directory)
        assert (core.weight, core.executed) == (WEIGHT, VERBS)


async def test_an_answer_that_takes_longer_than_a_long_poll_is_waited_for() -> None:
    core = TinyCore()
    core.sampling_s = 0.2  # four times max_wait_s
    async with engine_on(core) as engine:
        completion = await engine.sample(token_ids([1]), PARAMS, session_id="s", turn_index=7)
    assert completion.token_ids.tolist() == [7, 7, 7]
    assert core.executed == ["sample"]


async def test_a_service_that_stays_away_ends_the_call_within_its_patience() -> None:
    core = TinyCore()
    brief = Patience(total_s=0.2, first_s=0.01, longest_s=0.02)
    async with engine_on(core, [Fault.LOST_REPLY] * 1000, patience=brief) as engine:
        with pytest.raises(LostReplyError, match="no reply to POST /j/core/step"):
            await engine.step(adam())
    assert core.executed == ["step"]


# --- batches over the cap ---


async def test_a_batch_over_the_cap_goes_in_pieces_of_whole_rollouts_that_add_up() -> None:
    samples = [sample(f"r{i % 6}", size=200, advantage=float(i)) for i in range(12)]
    samples = [replace(each, sampler_logprobs=each.sampler_logprobs - i) for i, each in enumerate(samples)]
    whole, split = TinyCore(), TinyCore(max_request_bytes=2**16 + 16_000)
    async with engine_on(whole) as engine:
        one = await engine.forward_backward(samples, LossConfig())
        await engine.step(adam())
    async with engine_on(split) as engine:
        many = await engine.forward_backward(samples, LossConfig())
        result = await engine.step(adam())
    assert len(split.piece_bytes) == 3  # 4 samples of about 4 kB each fit
    assert max(split.piece_bytes) <= 2**16 + 16_000
    assert result.num_backwards == 3
    assert split.weight == pytest.approx(whole.weight, abs=1e-9)
    assert many.loss == pytest.approx(one.loss)
    assert (many.trained_tokens, many.num_sequences) == (24, 6)
    assert (many.logprob_gap_mean, many.logprob_gap_max) == (0.25, 4.0)
    for measured in (one, many):
        expected = np.concatenate([each.sampler_logprobs[each.loss_mask] for each in samples])
        np.testing.assert_array_equal(measured.trainer_logprobs_n, expected)


async def test_the_callers_denominators_go_with_every_piece() -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        larger = Denominators(trained_tokens=100, num_sequences=4)
        await engine.forward_backward([sample("a", advantage=1.0)], LossConfig(), denominators=larger)
    assert core.gradient == 2 / 4


async def test_a_rollout_over_the_cap_is_refused_before_it_is_sent() -> None:
    core = TinyCore(max_request_bytes=2**16 + 1000)
    async with engine_on(core) as engine:
        with pytest.raises(ConfigError, match=r"one rollout makes a request of .* bytes"):
            await engine.forward_backward([sample(size=20_000)], LossConfig())
    assert core.executed == []


async def test_log_probs_come_back_in_the_order_of_the_samples() -> None:
    samples = [sample("a", size=300), sample("b", first_id=50, size=300), sample("a", first_id=9, size=300)]
    core = TinyCore(max_response_bytes=2**16 + 14_000)
    async with engine_on(core) as engine:
        found = await engine.forward(samples, temperature=2.0)
    assert len(core.piece_bytes) == 2
    for asked, logprobs in zip(samples, found, strict=True):
        expected = np.where(asked.loss_mask, -asked.token_ids / 2, 0)
        np.testing.assert_allclose(logprobs, expected)


# --- errors ---


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.CONTEXT_EXCEEDED, ContextExceededError),
        (ErrorCode.WEIGHTS_CHANGING, WeightsChangingError),
        (ErrorCode.SAMPLER_ERROR, SamplerError),
    ],
)
async def test_a_samplers_error_is_the_same_on_this_side(code: ErrorCode, error: type[SamplerError]) -> None:
    core = TinyCore()
    core.fails_next = Refused(
        code, "so it is", retryable=code is not ErrorCode.CONTEXT_EXCEEDED, retry_after_s=3
    )
    async with engine_on(core) as engine:
        with pytest.raises(SamplerError, match="so it is") as caught:
            await engine.sample(token_ids([1]), PARAMS, session_id="s", turn_index=0)
    assert type(caught.value) is error
    assert caught.value.retryable is (code is not ErrorCode.CONTEXT_EXCEEDED)
    if isinstance(caught.value, WeightsChangingError):
        assert caught.value.retry_after_s == 3


async def test_a_trainers_error_uses_its_number_up_and_the_next_call_goes_on() -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        with pytest.raises(TrainerError, match="nothing was accumulated"):
            await engine.step(adam())
        await engine.forward_backward([sample()], LossConfig())
        assert (await engine.step(adam())).num_backwards == 1


async def test_two_drivers_of_one_job_are_told_so() -> None:
    core = TinyCore()
    async with engine_on(core) as first, engine_on(core) as second:
        await first.publish()
        with pytest.raises(ConflictError, match="sequence 1 was used by another operation"):
            await second.publish()
    assert core.weights_version == 1


async def test_a_cancelled_sample_frees_its_slot_at_once() -> None:
    core = TinyCore()
    core.sampling_s = 60.0
    async with engine_on(core) as engine:
        task = asyncio.create_task(engine.sample(token_ids([1]), PARAMS, session_id="s", turn_index=0))
        await core.has_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(core.cancelled) == 1
    assert core._running == {}


# --- a gradient that was not added whole ---


async def test_what_a_batch_that_failed_halfway_has_added_is_never_applied() -> None:
    core = TinyCore(max_request_bytes=2**16 + 2000)
    samples = [sample(str(index), size=24, advantage=1.0) for index in range(8)]
    async with engine_on(core) as engine:
        core.fails_next_after = 1, Refused(ErrorCode.TRAINER_ERROR, "out of memory")
        with pytest.raises(TrainerError, match="out of memory"):
            await engine.forward_backward(samples, LossConfig())
        assert core.gradient > 0
        with pytest.raises(TrainerError, match="nothing was accumulated"):
            await engine.step(adam())
        await engine.forward_backward(samples, LossConfig())
        assert core.num_backwards > 1
        await engine.step(adam())
    clean = TinyCore()
    async with engine_on(clean) as engine:
        await engine.forward_backward(samples, LossConfig())
        await engine.step(adam())
    assert core.weight == pytest.approx(clean.weight)


async def test_a_driver_that_comes_to_a_used_job_discards_what_the_last_one_left() -> None:
    core = TinyCore()
    async with engine_on(core) as first:
        await first.forward_backward([sample("a", advantage=9.0)], LossConfig())
    async with engine_on(core) as second:
        await second.forward_backward([sample("b", advantage=1.0)], LossConfig())
        await second.step(adam(0.5))
    assert core.weight == 1.0 - 0.5 * 2.0  # two trained tokens of the second batch alone
    assert core.executed == ["forward_backward", "discard", "forward_backward", "step"]


# --- leases ---


async def test_the_lease_is_renewed_three_times_in_its_length() -> None:
    core = TinyCore()
    async with engine_on(core, lease_s=0.3):
        await asyncio.sleep(0.55)
    assert 4 <= len(core.leases) <= 7  # at 0, 0.1, ... 0.5, give or take a slow machine
    assert set(core.leases) == {0.3}


async def test_a_job_that_ends_fails_the_calls_that_wait_with_its_reason_and_last_words() -> None:
    core = TinyCore()
    core.sampling_s = 60.0
    async with engine_on(core, lease_s=0.15) as engine:
        sampling = asyncio.create_task(engine.sample(token_ids([1]), PARAMS, session_id="s", turn_index=0))
        await asyncio.sleep(0.05)
        core.status, core.reason = "failed", "engine_lost: it died"
        with pytest.raises(SamplerError, match="engine_lost: it died") as caught:
            await sampling
        assert not caught.value.retryable
        with pytest.raises(JobFailedError, match="job j is failed: engine_lost: it died") as failed:
            await engine.step(adam())
        assert failed.value.log_tail == ("INFO engine: opened", "ERROR engine: out of memory")


async def test_a_service_that_cannot_be_reached_does_not_end_the_lease() -> None:
    core = TinyCore()
    core.jobs["j"], core.status = {}, "running"
    faults = [Fault.NONE, Fault.UNREACHABLE, Fault.BUSY, Fault.LOST_REPLY]
    transport = FaultyTransport(core.app, faults)
    async with (
        Http(LOCAL, patience=FAST, transport=transport) as http,
        CoreEngine.attach(
            http, "j", capabilities=core.capabilities, stop_token_ids=(0,), lease_s=0.15
        ) as engine,
    ):
        await asyncio.sleep(0.4)
        assert await engine.publish() == 1
    assert len(core.leases) >= 2


async def test_what_the_body_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with engine_on(TinyCore(), lease_s=1.0):
            raise KeyError("mine")


# --- checkpoints ---


async def test_a_checkpoint_of_another_job_is_loaded_by_its_directory(tmp_path: Path) -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        await engine.forward_backward([sample()], LossConfig())
        await engine.step(adam())
        await engine.save(tmp_path / "step-0001")
    saved, core.weight = core.weight, 99.0
    core.jobs["k"] = {}
    transport = FaultyTransport(core.app)
    async with (
        Http(LOCAL, patience=FAST, transport=transport) as http,
        CoreEngine.attach(
            http, "k", capabilities=core.capabilities, stop_token_ids=(0,), lease_s=None
        ) as other,
    ):
        await other.load(tmp_path / "step-0001")
    assert core.weight == saved
    assert b'"source_job_id":"j"' in transport.requests[-1].content


async def test_a_checkpoint_that_changed_in_the_service_is_refused(tmp_path: Path) -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        await engine.save(tmp_path / "c")
        [(name, (weight, record))] = core.saved.items()
        core.saved[name] = weight, record.model_copy(update={"sha256": "0" * 64})
        with pytest.raises(TrainerError, match="it was changed in the service"):
            await engine.load(tmp_path / "c")


async def test_a_directory_without_a_remote_checkpoint_says_which_backend_wrote_it(tmp_path: Path) -> None:
    async with engine_on(TinyCore()) as engine:
        with pytest.raises(ConfigError, match=r"holds no remote_checkpoint\.json"):
            await engine.load(tmp_path)


async def test_a_checkpoint_that_is_gone_is_a_trainers_error(tmp_path: Path) -> None:
    core = TinyCore()
    async with engine_on(core) as engine:
        await engine.save(tmp_path / "c")
        core.saved.clear()
        with pytest.raises(TrainerError, match="no checkpoint c-"):
            await engine.load(tmp_path / "c")
