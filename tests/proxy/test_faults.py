"""What goes wrong around a sampler call: faults, retries, clients that leave, sessions that end."""

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from tests.fakes import ScriptedSampler, WordRenderer
from tests.proxy.rig import HASTE, Connection, client_of, rig, spec, user

from pilotage.errors import ContextExceededError, SamplerError, WeightsChangingError
from pilotage.proxy import ChatCompletionsProxy, Patience, serve
from pilotage.types import BranchCause, Completion, FinishReason, SamplingParams, TokenIds


class WeightsAlmostReady(WeightsChangingError):
    """Worth a short wait."""

    retry_after_s = 0.01


class Hopeless(SamplerError):
    """Not worth a second attempt."""

    retryable = False


async def until_started(sampler: ScriptedSampler, count: int = 1) -> None:
    """Wait until `count` calls have reached the sampler."""
    while sampler.num_started < count:  # noqa: ASYNC110 - a fake without hooks is polled
        await asyncio.sleep(0)


async def test_a_short_change_of_weights_is_waited_out() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[WeightsAlmostReady("soon"), words.reply("ok")]) as it:
        assert (await it.ask([user("a")]))["content"] == "ok"
        record = await it.close()
    assert len(record.trajectory.turns) == 1
    assert record.sampler_failure == ""
    assert [call.turn_index for call in it.sampler.calls] == [0, 0]


async def test_a_long_change_of_weights_is_a_429_with_retry_after() -> None:
    async with rig(script=[WeightsChangingError("publishing")]) as it:  # 1 s, and 0.05 s is allowed
        answer = await it.post([user("a")])
        record = await it.close()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "weights_changing"
    assert record.sampler_failure == "publishing"
    assert record.trajectory.turns == ()


async def test_a_transient_fault_is_repeated_inside_the_proxy() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[SamplerError("1"), SamplerError("2"), words.reply("ok")]) as it:
        assert (await it.ask([user("a")]))["content"] == "ok"
        assert (await it.close()).sampler_failure == ""


async def test_a_lasting_fault_is_a_503_and_is_recorded() -> None:
    words = WordRenderer()
    script = [SamplerError("1"), SamplerError("2"), SamplerError("gpu lost"), words.reply("ok")]
    async with rig(renderer=words, script=script) as it:
        answer = await it.post([user("a")])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sampler_error")
        await it.ask([user("a")])
        record = await it.close()
    assert record.sampler_failure == "gpu lost"
    assert [turn.branch_cause for turn in record.trajectory.turns] == [None]  # a failed call is no turn
    assert [call.turn_index for call in it.sampler.calls] == [0, 0, 0, 0]


async def test_a_fault_that_is_not_retryable_is_not_repeated() -> None:
    async with rig(script=[Hopeless("no such model")]) as it:
        assert (await it.post([user("a")])).status_code == 503
    assert it.sampler.num_started == 1


async def test_a_fault_that_nobody_foresaw_is_a_500_and_is_not_blamed_on_the_agent() -> None:
    async with rig(script=[RuntimeError("device lost")]) as it:
        assert (await it.post([user("a")])).status_code == 500
        assert (await it.close()).sampler_failure == "RuntimeError: device lost"


async def test_a_sampler_that_finds_the_prompt_too_long_is_an_overflow() -> None:
    async with rig(script=[ContextExceededError("too long")]) as it:
        answer = await it.post([user("a")])
        record = await it.close()
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert record.is_context_exceeded
    assert record.sampler_failure == ""


class BrokenSampler:
    """Returns a completion that nothing could be trained from."""

    max_context_tokens = 100

    def __init__(self, logprobs: Sequence[float]) -> None:
        self.logprobs = logprobs

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        size = len(self.logprobs)
        return Completion(
            token_ids=np.zeros(size, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weights_versions=np.zeros(size, np.int32),
            finish_reason=FinishReason.STOP,
        )


@pytest.mark.parametrize(("logprobs", "complaint"), [([], "no token"), ([-0.5, float("nan")], "not finite")])
async def test_half_a_completion_is_a_sampler_fault_and_not_a_turn(
    logprobs: list[float], complaint: str
) -> None:
    proxy = ChatCompletionsProxy(BrokenSampler(logprobs), WordRenderer(), patience=HASTE)
    access = proxy.open(spec())
    async with client_of(proxy, access.api_key) as client:
        answer = await client.post("/chat/completions", json={"messages": [user("a")]})
    assert answer.status_code == 503
    assert complaint in answer.json()["error"]["message"]
    record = await proxy.close(access)
    assert record.trajectory.turns == ()
    assert complaint in record.sampler_failure


async def test_identical_requests_share_one_running_call() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), gate=asyncio.Event())
    async with rig(renderer=words, sampler=sampler) as it:
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(it.post([user("a")])),
                group.create_task(it.post([user("a")], stream=True)),  # the form may differ
                group.create_task(it.post([{"role": "user", "content": [{"type": "text", "text": "a"}]}])),
            ]
            await until_started(sampler)
            await asyncio.sleep(0.02)
            assert it.sampler.gate
            it.sampler.gate.set()
        record = await it.close()
    assert [answer.result().status_code for answer in answers] == [200, 200, 200]
    assert answers[0].result().json()["id"] == answers[2].result().json()["id"]
    assert '"content":"one"' in answers[1].result().text
    assert sampler.num_started == len(record.trajectory.turns) == 1
    assert record.counters["coalesced"] == 2


async def test_different_requests_of_one_session_run_side_by_side() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=lambda prompt: words.reply("same"), gate=asyncio.Event())
    async with rig(renderer=words, sampler=sampler) as it:
        async with asyncio.TaskGroup() as group:
            for text in ("a", "b", "c"):
                group.create_task(it.post([user(text)]))
            await until_started(sampler, 3)
            assert it.sampler.gate
            it.sampler.gate.set()
        record = await it.close()
    assert sorted(call.turn_index for call in sampler.calls) == [0, 1, 2]
    assert [turn.branch_cause for turn in record.trajectory.turns] == [
        None,
        *[BranchCause.NEW_CONVERSATION] * 2,
    ]


@pytest.mark.parametrize(
    ("first", "again", "is_replayed"),
    [
        ({}, {"x-stainless-retry-count": "1"}, True),
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}, True),
        ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "0"}, False),
        ({"idempotency-key": "k"}, {"idempotency-key": "l"}, False),
        ({}, {"idempotency-key": ""}, False),
        ({}, {}, False),
    ],
)
async def test_a_finished_request_is_replayed_only_if_its_client_says_that_it_repeats(
    first: dict[str, str], again: dict[str, str], is_replayed: bool
) -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one"), words.reply("two")]) as it:
        before = (await it.post([user("a")], headers=first)).json()
        after = (await it.post([user("a")], headers=again)).json()
        record = await it.close()
    assert (before["id"] == after["id"]) is is_replayed
    assert record.counters.get("replayed", 0) == is_replayed
    causes = [turn.branch_cause for turn in record.trajectory.turns]
    assert causes == ([None] if is_replayed else [None, BranchCause.RETRY])


async def test_a_marked_retry_of_something_never_asked_is_sampled() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")]) as it:
        assert (await it.post([user("a")], headers={"x-stainless-retry-count": "2"})).status_code == 200


async def test_a_client_that_leaves_cancels_its_sampling_and_nothing_is_recorded() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), gate=asyncio.Event())
    async with rig(renderer=words, sampler=sampler) as it:
        connection = Connection(it.proxy, it.access.api_key, {"messages": [user("a")]})
        running = asyncio.create_task(connection.run())
        await until_started(sampler)
        connection.cut.set()
        await running
        assert it.sampler.gate
        it.sampler.gate.set()
        await it.ask([user("a")])
        record = await it.close()
    assert sampler.num_cancelled == 1
    assert [(turn.branch_cause, turn.is_delivered) for turn in record.trajectory.turns] == [(None, True)]
    assert record.counters["orphaned"] == 0
    assert [call.turn_index for call in sampler.calls] == [0]  # the cancelled call's draw is used again


async def test_a_completion_whose_client_has_left_is_an_orphan_until_it_is_replayed() -> None:
    words = WordRenderer()
    script = [words.reply("one"), words.reply("two")]
    left: list[Connection] = []

    def leave_while_sampling(prompt: TokenIds) -> list[int]:
        left[0].cut.set()
        return script.pop(0)

    sampler = ScriptedSampler(script=leave_while_sampling)
    async with rig(renderer=words, sampler=sampler) as it:
        left.append(Connection(it.proxy, it.access.api_key, {"messages": [user("a")]}))
        await left[0].run()
        assert it.proxy is not None
        second = Connection(it.proxy, it.access.api_key, {"messages": [user("b")]})
        left.insert(0, second)
        await second.run()
        replay = await it.post([user("a")], headers={"x-stainless-retry-count": "1"})
        record = await it.close()
    assert replay.json()["choices"][0]["message"]["content"] == "one"
    assert [turn.is_delivered for turn in record.trajectory.turns] == [True, False]
    assert record.counters["orphaned"] == 1
    assert [len(connection.sent) for connection in left] == [2, 2]  # a start and an empty body nobody reads


async def test_one_of_two_waiting_clients_may_leave() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), gate=asyncio.Event())
    async with rig(renderer=words, sampler=sampler) as it:
        connection = Connection(it.proxy, it.access.api_key, {"messages": [user("a")]})
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(connection.run())
            staying = group.create_task(it.post([user("a")]))
            await until_started(sampler)
            await asyncio.sleep(0.02)
            connection.cut.set()
            await leaving
            assert it.sampler.gate
            it.sampler.gate.set()
        record = await it.close()
    assert staying.result().json()["choices"][0]["message"]["content"] == "one"
    assert (sampler.num_cancelled, record.counters["coalesced"]) == (0, 1)


async def test_a_request_that_follows_a_cancelled_twin_gets_a_call_of_its_own() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), gate=asyncio.Event())
    async with rig(renderer=words, sampler=sampler) as it:
        first = asyncio.create_task(it.post([user("a")]))
        await until_started(sampler)
        first.cancel()
        second = asyncio.create_task(it.post([user("a")]))  # before the first task has ended
        await until_started(sampler, 2)
        assert it.sampler.gate
        it.sampler.gate.set()
        assert (await second).status_code == 200
        assert len((await it.close()).trajectory.turns) == 1
    assert sampler.num_cancelled == 1


async def test_closing_a_session_cancels_its_running_call_at_once() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), latency_s=60)
    async with rig(renderer=words, sampler=sampler) as it:
        running = asyncio.create_task(it.post([user("a")]))
        await until_started(sampler)
        async with asyncio.timeout(1):
            record = await it.close()
        assert (await running).status_code == 401
    assert sampler.num_cancelled == 1
    assert record.trajectory.turns == ()


async def test_a_turn_is_recorded_before_the_first_byte_of_its_answer() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")]) as it:
        records: list[int] = []

        class Watching(Connection):
            async def _send(self, message: MutableMapping[str, Any]) -> None:
                if not self.sent:
                    records.append(len((await it.close()).trajectory.turns))
                await super()._send(message)

        await Watching(it.proxy, it.access.api_key, {"messages": [user("a")], "stream": True}).run()
    assert records == [1]


async def test_a_client_that_hangs_up_on_a_real_socket_frees_the_sampler() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one")]), latency_s=60)
    proxy = ChatCompletionsProxy(sampler, words)
    async with serve(proxy) as base_url:
        access = proxy.open(spec())
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=0.2) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/chat/completions", json={"messages": [user("a")]})
        async with asyncio.timeout(2):
            while not sampler.num_cancelled:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        assert (await proxy.close(access)).trajectory.turns == ()


def test_a_proxy_that_never_tries_is_refused() -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        Patience(max_attempts=0)
