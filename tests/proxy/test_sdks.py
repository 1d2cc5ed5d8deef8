"""The official SDKs of OpenAI and Anthropic on the proxy: every dialect keeps the same promises."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from tests.fakes import ASSISTANT, END, TOOL, USER, Script, ScriptedSampler, WordRenderer
from tests.proxy.rig import HASTE, spec
from tests.proxy.sdks import AGENTS, AnyAgent, agent_for, as_object

from pilotage.algorithms import to_samples
from pilotage.errors import SamplerError, WeightsChangingError
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import SamplingParams, SessionAccess, SessionRecord, SessionSpec

pytestmark = [
    pytest.mark.parametrize("kind", sorted(AGENTS)),
    pytest.mark.parametrize("is_streamed", [False, True]),
]

ERRORS: dict[str, Any] = {"chat": openai, "responses": openai, "messages": anthropic}


class Bench:
    """A proxy with one session, a sampler with a script, and an agent on an SDK."""

    def __init__(
        self, kind: str, script: Sequence[Script], *, session: SessionSpec | None = None, **sampler: Any
    ) -> None:
        self.kind = kind
        self.words = WordRenderer()
        self.sampler = ScriptedSampler(script=iter(script), **sampler)
        self.proxy = ChatCompletionsProxy(self.sampler, self.words, patience=HASTE)
        self.access = self.proxy.open(session or spec())
        self.agents: list[AnyAgent] = []

    def agent(
        self, *, tools: Sequence[str] = (), access: SessionAccess | None = None, **client: Any
    ) -> AnyAgent:
        client = {"max_retries": 0, **client}
        agent = agent_for(self.kind, access or self.access, self.proxy, tools=tools, **client)
        self.agents.append(agent)
        return agent

    async def close(self) -> SessionRecord:
        return await self.proxy.close(self.access)


@contextlib.asynccontextmanager
async def bench(kind: str, script: Sequence[Script] = (), **options: Any) -> AsyncGenerator[Bench]:
    it = Bench(kind, script, **options)
    try:
        yield it
    finally:
        for agent in it.agents:
            await agent.close()


async def test_a_conversation_with_parallel_calls_and_reasoning_is_one_branch_and_nothing_is_encoded_twice(
    kind: str, is_streamed: bool
) -> None:
    async with bench(kind) as it:
        words = it.words
        sampled = [
            words.reply(
                "I look.", ("ls", '{"path": "caf\u00e9", "depth": 2.5}'), ("cat", "{}"), reasoning="where to"
            ),
            words.reply("", ("ls", '{ "path":"\u4e2d" }')),
            words.reply("It is there."),
        ]
        it.sampler.script = iter(sampled)
        agent = it.agent(tools=("ls", "cat"))
        agent.hear("find it")
        first = await agent.speak(is_streamed=is_streamed)
        agent.observe({id: f"saw {name}" for id, name, _ in first.calls})
        second = await agent.speak(is_streamed=is_streamed)
        agent.observe({id: "nothing" for id, _, _ in second.calls})
        third = await agent.speak(is_streamed=is_streamed)
        record = await it.close()

    assert (first.text, first.reasoning) == ("I look.", "where to")
    assert [(id, name, as_object(value)) for id, name, value in first.calls] == [
        ("call_0_0", "ls", {"path": "caf\u00e9", "depth": 2.5}),
        ("call_0_1", "cat", {}),
    ]
    assert [(id, as_object(value)) for id, _, value in second.calls] == [("call_1_0", {"path": "\u4e2d"})]
    assert third.text == "It is there."
    called = "completed" if kind == "responses" else {"chat": "tool_calls", "messages": "tool_use"}[kind]
    ended = {"chat": "stop", "messages": "end_turn", "responses": "completed"}[kind]
    assert [said.finish for said in (first, second, third)] == [called, called, ended]
    turns = record.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.completion_ids.tolist() for turn in turns] == sampled
    saw = [[TOOL, *words.encode(text), END] for text in ("saw ls", "saw cat", "nothing")]
    assert turns[1].context_ids.tolist() == [*saw[0], *saw[1], ASSISTANT]
    assert turns[2].context_ids.tolist() == [*saw[2], ASSISTANT]
    for index, call in enumerate(it.sampler.calls):
        assert record.trajectory.prompt_ids(index).tolist() == call.prompt_ids.tolist()
    assert third.usage == (it.sampler.calls[2].prompt_ids.size, len(sampled[2]))
    samples = to_samples(record.trajectory, sequence_id="r", group_id="g", advantage=1.0)
    assert len(samples) == 1
    assert samples[0].trained_tokens == record.trajectory.sampled_tokens


async def test_all_dialects_put_the_same_prompt_to_the_sampler(kind: str, is_streamed: bool) -> None:
    prompts: list[list[int]] = []
    words = WordRenderer()
    for each in ("chat", kind):
        async with bench(each) as it:
            it.words = words
            it.sampler.script = iter([words.reply("hi", ("ls", "{}")), words.reply("ok")])
            it.proxy = ChatCompletionsProxy(it.sampler, words)
            it.access = it.proxy.open(spec())
            agent = it.agent(tools=("ls",))
            agent.hear("find it")
            said = await agent.speak(is_streamed=is_streamed)
            agent.observe({id: "x" for id, _, _ in said.calls})
            agent.hear("go on")
            await agent.speak(is_streamed=is_streamed)
            prompts.append([i for call in it.sampler.calls for i in call.prompt_ids.tolist()])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("arguments", ['{"cmd": "ls', "[1]", '{"a": 1e400}', '"text"', ""])
async def test_a_malformed_call_reaches_the_agent_and_finds_its_turn_when_it_comes_back(
    kind: str, is_streamed: bool, arguments: str
) -> None:
    async with bench(kind) as it:
        it.sampler.script = iter([it.words.reply("", ("ls", arguments)), it.words.reply("ok")])
        agent = it.agent(tools=("ls",))
        agent.hear("go")
        [(id, name, _)] = (await agent.speak(is_streamed=is_streamed)).calls
        assert (id, name) == ("call_0_0", "ls")
        agent.observe({id: "these are no arguments"})
        await agent.speak(is_streamed=is_streamed)
        record = await it.close()
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0]


@pytest.mark.parametrize(
    "arguments", ['{"malformed_arguments": "x"}', '{"n": 123456789012345678901234567890}']
)
async def test_odd_arguments_find_their_turn_when_they_come_back(
    kind: str, is_streamed: bool, arguments: str
) -> None:
    async with bench(kind) as it:
        it.sampler.script = iter([it.words.reply("", ("ls", arguments)), it.words.reply("ok")])
        agent = it.agent(tools=("ls",))
        agent.hear("go")
        said = await agent.speak(is_streamed=is_streamed)
        agent.observe({id: "fine" for id, _, _ in said.calls})
        await agent.speak(is_streamed=is_streamed)
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


@pytest.mark.parametrize(("text", "thought"), [("", ""), ("", "hm"), ("\n", ""), ("ok", "hm")])
async def test_an_answer_that_says_little_is_a_turn_like_any_other(
    kind: str, is_streamed: bool, text: str, thought: str
) -> None:
    async with bench(kind) as it:
        it.sampler.script = iter([it.words.reply(text, reasoning=thought), it.words.reply("ok")])
        agent = it.agent()
        agent.hear("go")
        said = await agent.speak(is_streamed=is_streamed)
        assert (said.text, said.reasoning or "") == (text, thought)
        agent.hear("on")
        await agent.speak(is_streamed=is_streamed)
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


async def test_an_answer_cut_by_its_length_says_so(kind: str, is_streamed: bool) -> None:
    session = spec(sampling=SamplingParams(max_tokens=3))
    async with bench(kind, session=session) as it:
        it.sampler.script = iter([it.words.reply("a b c d"), it.words.reply("ok")])
        agent = it.agent()
        agent.hear("go")
        said = await agent.speak(is_streamed=is_streamed)
        agent.hear("on")
        await agent.speak(is_streamed=is_streamed)
        record = await it.close()
    assert said.finish == {"chat": "length", "messages": "max_tokens", "responses": "max_output_tokens"}[kind]
    assert record.trajectory.turns[1].context_ids.tolist() == [
        END,
        USER,
        *it.words.encode("on"),
        END,
        ASSISTANT,
    ]


async def test_a_wrong_key_is_the_sdks_authentication_error(kind: str, is_streamed: bool) -> None:
    async with bench(kind) as it:
        await it.close()
        agent = it.agent()
        agent.hear("go")
        with pytest.raises(ERRORS[kind].AuthenticationError, match="names no open session"):
            await agent.speak(is_streamed=is_streamed)


async def test_an_overflow_is_a_bad_request_in_the_apis_own_words(kind: str, is_streamed: bool) -> None:
    async with bench(kind, max_context_tokens=20) as it:
        agent = it.agent()
        agent.hear("word " * 20)
        with pytest.raises(ERRORS[kind].BadRequestError) as caught:
            await agent.speak(is_streamed=is_streamed)
        record = await it.close()
    #      SYSTEM be - brief END, USER, 20 words and 20 blanks, END, ASSISTANT
    words = {
        "chat": "maximum context length is 20 tokens. However, your messages resulted in 48 tokens",
        "messages": "prompt is too long: 48 tokens > 20 maximum",
        "responses": "Your input exceeds the context window of this model.",
    }
    error: Any = caught.value
    assert words[kind] in error.message
    assert error.response.json()["error"]["code"] == "context_length_exceeded"
    assert record.is_context_exceeded
    assert it.sampler.num_started == 0


async def test_the_sdk_waits_for_new_weights_as_it_is_told_and_the_turn_is_sampled_once(
    kind: str, is_streamed: bool
) -> None:
    async with bench(kind) as it:
        it.sampler.script = iter([WeightsChangingError("publishing"), it.words.reply("ok")])  # wants 1 s
        agent = it.agent(max_retries=1)
        agent.hear("go")
        started = asyncio.get_running_loop().time()
        said = await agent.speak(is_streamed=is_streamed)
        waited_s = asyncio.get_running_loop().time() - started
        record = await it.close()
    assert said.text == "ok"
    assert waited_s > 0.95
    assert record.counters["refused_weights_changing"] == 1
    assert [turn.branch_cause for turn in record.trajectory.turns] == [None]


async def test_without_retries_the_sdk_raises_a_rate_limit_and_a_server_error(
    kind: str, is_streamed: bool
) -> None:
    script = [WeightsChangingError("publishing"), *[SamplerError("gpu lost")] * HASTE.max_attempts]
    async with bench(kind, script) as it:
        agent = it.agent()
        agent.hear("go")
        with pytest.raises(ERRORS[kind].RateLimitError) as caught:
            await agent.speak(is_streamed=is_streamed)
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(ERRORS[kind].InternalServerError, match="gpu lost"):
            await agent.speak(is_streamed=is_streamed)
        assert (await it.close()).trajectory.turns == ()


async def test_a_retry_of_the_sdk_after_a_lost_answer_gets_the_recorded_turn(
    kind: str, is_streamed: bool
) -> None:
    async with bench(kind) as it:
        it.sampler.script = iter([it.words.reply("one")])
        agent = it.agent()
        agent.hear("go")
        await agent.speak(is_streamed=is_streamed)
        agent.items.pop()  # the answer was lost on its way
        agent.options["extra_headers"] = {"x-stainless-retry-count": "1"}
        assert (await agent.speak(is_streamed=is_streamed)).text == "one"
        record = await it.close()
    assert len(record.trajectory.turns) == 1
    assert record.counters["replayed"] == 1


async def test_sampling_options_of_the_agent_are_counted_under_one_name_and_not_obeyed(
    kind: str, is_streamed: bool
) -> None:
    own = SamplingParams(seed=3, max_tokens=64)
    limit = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}[kind]
    async with bench(kind, session=spec(sampling=own)) as it:
        it.sampler.script = iter([it.words.reply("one"), it.words.reply("two")])
        agent = it.agent()
        agent.options |= {"temperature": 1.0, "top_p": 1.0, limit: 64}
        agent.hear("go")
        await agent.speak(is_streamed=is_streamed)
        agent.options |= {"temperature": 0.3, limit: 9}
        agent.hear("on")
        await agent.speak(is_streamed=is_streamed)
        record = await it.close()
    assert {call.params for call in it.sampler.calls} == {own}
    counted = {name: count for name, count in record.counters.items() if name.startswith("overridden_")}
    assert counted == {"overridden_temperature": 1, "overridden_max_tokens": 1}


async def test_a_spent_turn_budget_is_a_bad_request(kind: str, is_streamed: bool) -> None:
    async with bench(kind, session=spec(max_turns=1)) as it:
        it.sampler.script = iter([it.words.reply("one")])
        agent = it.agent()
        agent.hear("go")
        await agent.speak(is_streamed=is_streamed)
        agent.hear("on")
        with pytest.raises(ERRORS[kind].BadRequestError, match="budget of 1 model calls is spent"):
            await agent.speak(is_streamed=is_streamed)
        assert (await it.close()).counters["refused_turn_budget_exhausted"] == 1


async def test_an_agent_that_leaves_frees_the_sampler_and_nothing_is_recorded(
    kind: str, is_streamed: bool
) -> None:
    sampler = ScriptedSampler(script=iter([[END]]), latency_s=60)
    proxy = ChatCompletionsProxy(sampler, WordRenderer())
    async with serve(proxy):
        access = proxy.open(spec())
        agent = agent_for(kind, access, max_retries=0)
        agent.hear("go")
        speaking = asyncio.create_task(agent.speak(is_streamed=is_streamed))
        while not sampler.num_started:  # noqa: ASYNC110 - a fake without hooks is polled
            await asyncio.sleep(0.01)
        speaking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await speaking
        async with asyncio.timeout(5):
            while not sampler.num_cancelled:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        await agent.close()
        assert (await proxy.close(access)).trajectory.turns == ()


async def test_identical_requests_of_two_agents_share_one_running_call(kind: str, is_streamed: bool) -> None:
    async with bench(kind, gate=asyncio.Event()) as it:
        it.sampler.script = iter([it.words.reply("one")])
        agents = [it.agent() for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                agent.hear("go")
            said = [group.create_task(agent.speak(is_streamed=is_streamed)) for agent in agents]
            while not it.sampler.num_started:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert it.sampler.gate
            it.sampler.gate.set()
        record = await it.close()
    assert [each.result().text for each in said] == ["one", "one"]
    assert record.counters["coalesced"] == 1
    assert len(record.trajectory.turns) == 1
