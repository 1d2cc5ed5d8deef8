"""The wire: authentication, shapes of replies and refusals, options that the agent does not own."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.fakes import ScriptedSampler, WordRenderer
from tests.proxy.rig import Body, client_of, rig, spec, tool, user

from pilotage.errors import ConfigError, TemplateError
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import Message, ProxyAddress, SamplingParams, TokenIds, ToolSchema

MALFORMED: list[tuple[bytes, str]] = [
    (b"{", "not valid JSON"),
    (b"[" * 5_000, "not valid JSON"),
    (b'"text"', "must be a JSON object, got str"),
    (b"{}", "messages must be a list"),
    (b'{"messages": []}', "at least one message"),
    (b'{"messages": ["hi"]}', "messages[0] must be an object"),
    (b'{"messages": [{"role": "bard"}]}', "messages[0].role must be one of"),
    (b'{"messages": [{"role": ["user"]}]}', "messages[0].role must be one of"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content must be a string"),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        "messages[0].content[0] has type 'image_url'; this policy reads text only",
    ),
    (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "content[0].text must be a string"),
    (b'{"messages": [{"role": "assistant", "tool_calls": {}}]}', "messages[0].tool_calls must be a list"),
    (
        b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
        "tool_calls[0].function must be an object",
    ),
    (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
        "tool_calls[0].function needs a name and arguments that are strings",
    ),
    (
        b'{"messages": [{"role": "assistant", "tool_calls":'
        b' [{"function": {"name": "a", "arguments": {}}}]}]}',
        "tool_calls[0].function needs a name and arguments that are strings",
    ),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools must be a list"),
    (
        b'{"messages": [{"role": "user"}], "tools": [{"type": "web_search"}]}',
        "tools[0].type must be 'function'",
    ),
    (
        b'{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}',
        "tools[0].function must be an object",
    ),
    (
        b'{"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {}}]}',
        "tools[0].function needs a name",
    ),
    (b'{"messages": [{"role": "user"}], "stream": "yes"}', "stream must be true or false"),
    (b'{"messages": [{"role": "user"}], "stream_options": [1]}', "stream_options must be an object"),
    (b'{"messages": [{"role": "user"}], "functions": [{}]}', "functions is not supported; use tools"),
    (b'{"messages": [{"role": "user"}], "n": 2}', "n=2 is not supported"),
]


@pytest.mark.parametrize(("body", "complaint"), MALFORMED)
async def test_a_malformed_body_is_a_400_that_names_its_place(body: bytes, complaint: str) -> None:
    async with rig() as it:
        answer = await it.client.post("/chat/completions", content=body)
        record = await it.close()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert complaint in error["message"]
    assert error["type"] == "invalid_request_error"
    assert record.counters[f"refused_{error['code']}"] == 1
    assert it.sampler.num_started == 0


async def test_a_body_over_64_mib_is_refused_before_it_is_read_whole() -> None:
    async with rig() as it:
        answer = await it.client.post("/chat/completions", content=b" " * (64 * 2**20 + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer nonsense", "Bearer " + "é" * 9, "Basic {key}"]
)
async def test_anything_but_the_sessions_key_is_a_401(header: str) -> None:
    async with rig() as it:
        headers = {"authorization": header.format(key=it.access.api_key).encode()}
        for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
            answer = await it.client.request(method, path, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_an_expired_key_is_a_401_and_its_record_is_kept() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("ok")], session=spec(ttl_s=0.2)) as it:
        await it.ask([user("a")])
        await asyncio.sleep(0.25)
        assert (await it.post([user("b")])).status_code == 401
        assert len((await it.close()).trajectory.turns) == 1


async def test_a_prolonged_key_lives_as_much_longer() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("ok")], session=spec(ttl_s=0.2)) as it:
        it.proxy.prolong(it.access, 60.0)
        await asyncio.sleep(0.25)
        await it.ask([user("a")])
        it.proxy.prolong(it.access, -60.0)
        assert (await it.post([user("b")])).status_code == 401


async def test_a_closed_key_is_a_401_and_cannot_be_closed_again() -> None:
    async with rig() as it:
        await it.close()
        assert (await it.post([user("a")])).status_code == 401
        with pytest.raises(ValueError, match="not open"):
            await it.close()


async def test_two_sessions_never_meet() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one"), words.reply("two")]))
    proxy = ChatCompletionsProxy(sampler, words)
    first, second = proxy.open(spec(rollout_id="a")), proxy.open(spec(rollout_id="b"))
    assert first.api_key != second.api_key
    for access in (first, second):
        async with client_of(proxy, access.api_key) as client:
            await client.post("/chat/completions", json={"messages": [user("go")]})
    records = [await proxy.close(access) for access in (first, second)]
    assert [record.trajectory.turns[0].completion_ids.tolist() for record in records] == [
        words.reply("one"),
        words.reply("two"),
    ]
    assert [call.session_id for call in sampler.calls] == ["a", "b"]


async def test_the_key_is_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pilotage")
    script = [RuntimeError("boom")]
    async with rig(script=script) as it:
        answers = [
            await it.post([user("a")]),  # a fault of ours, logged whole
            await it.post([user("a")], temperature=0.1),
            await it.client.post("/chat/completions", content=b"{"),
        ]
        await it.close()
        answers.append(await it.post([user("a")]))
    assert [answer.status_code for answer in answers] == [500, 500, 400, 401]
    assert "boom" in caplog.text
    assert it.access.api_key not in caplog.text + "".join(answer.text for answer in answers)
    assert "boom" not in answers[0].text


async def test_models_and_health() -> None:
    async with rig(model_name="tiny") as it:
        models = (await it.client.get("/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(it.proxy.app)) as stranger:
            assert (await stranger.get("http://proxy/health")).json() == {"status": "ok"}


async def test_ids_and_log_probs_come_back_for_those_who_ask() -> None:
    words = WordRenderer()
    sampled = words.reply("one")
    async with rig(renderer=words, script=[sampled]) as it:
        answer = (await it.post([user("a")], return_token_ids=True, logprobs=True)).json()
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"] == it.sampler.calls[0].prompt_ids.tolist()
    assert choice["token_ids"] == sampled
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -0.25]
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{sampled[0]}"
    #   USER a END ASSISTANT, and the word with its END
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


async def test_nobody_pays_for_ids_that_were_not_asked_for() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")]) as it:
        answer = (await it.post([user("a")], logprobs=False)).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


def read_events(text: str) -> list[Any]:
    """Return the parsed events of a stream."""
    lines = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def test_a_stream_adds_up_to_the_reply_and_its_last_choice_holds_all_ids() -> None:
    words = WordRenderer()
    sampled = words.reply("see", ("ls", '{"n": 1}'), ("cat", "{}"), reasoning="hm")
    options: Body = {"stream": True, "return_token_ids": True, "logprobs": True}
    async with rig(renderer=words, script=[sampled]) as it:
        answer = await it.post([user("a")], stream_options={"include_usage": True}, **options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = read_events(answer.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "see"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    arguments = ["".join(p["function"]["arguments"] for p in parts if p["index"] == i) for i in range(2)]
    assert [orjson.loads(text) for text in arguments] == [{"n": 1}, {}]
    assert [part["id"] for part in parts if "id" in part] == ["call_0_0", "call_0_1"]
    last = chunks[-1]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert last["choices"][0]["token_ids"] == sampled
    assert (
        len(last["choices"][0]["logprobs"]["content"]) == usage["usage"]["completion_tokens"] == len(sampled)
    )
    assert last["prompt_token_ids"] == it.sampler.calls[0].prompt_ids.tolist()
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}


async def test_streamed_and_whole_replies_continue_the_same_turn() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one"), words.reply("two")]) as it:
        await it.post([user("a")], stream=True)
        await it.ask([user("a"), {"role": "assistant", "content": "one"}, user("b")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


OWN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=64, seed=3)


@pytest.mark.parametrize(
    ("asked", "overridden"),
    [
        ({"temperature": 0, "seed": 1}, {"temperature", "seed"}),
        ({"temperature": 1, "top_p": 1.0, "top_k": -1.0, "seed": 3, "max_completion_tokens": 64}, set[str]()),
        ({"top_k": 20.0, "max_tokens": 8}, {"top_k", "max_tokens"}),
        (
            {"stop": ["</s>"], "logit_bias": {"5": 1}, "tool_choice": "required"},
            {"stop", "logit_bias", "tool_choice"},
        ),
        (
            {"stop": None, "logit_bias": {}, "presence_penalty": 0.0, "tool_choice": "auto", "n": 1},
            set[str](),
        ),
        ({"reasoning_effort": "high", "min_p": 0.05}, {"reasoning_effort", "min_p"}),
    ],
)
async def test_sampling_options_of_the_agent_are_counted_and_not_obeyed(
    asked: Body, overridden: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = WordRenderer()
    script = [words.reply("one"), words.reply("two")]
    async with rig(renderer=words, script=script, session=spec(sampling=OWN)) as it:
        await it.ask([user("a")], **asked)
        await it.ask([user("b")], **asked)
        record = await it.close()
    assert {call.params for call in it.sampler.calls} == {OWN}
    assert {turn.sampling for turn in record.trajectory.turns} == {OWN}
    counted = {name: count for name, count in record.counters.items() if name.startswith("overridden_")}
    assert counted == {f"overridden_{name}": 2 for name in overridden}
    assert caplog.text.count("the recipe's stands") == len(overridden)  # once a session, not once a request


async def test_max_tokens_is_clamped_to_what_the_window_leaves() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("a b c d e f")]), max_context_tokens=10)
    async with rig(renderer=words, sampler=sampler, session=spec(sampling=OWN)) as it:
        answer = (await it.post([user("a")])).json()  # 4 prompt tokens of 10
        [turn] = (await it.close()).trajectory.turns
    assert answer["choices"][0]["finish_reason"] == "length"
    assert turn.completion_ids.size == turn.sampling.max_tokens == 6


async def test_overflow_is_a_400_in_the_providers_words_and_is_noted() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("ok")]), max_context_tokens=10)
    async with rig(renderer=words, sampler=sampler) as it:
        answer = await it.post([user("1 2 3 4")])  # USER, 7 words and blanks, END, ASSISTANT = 10
        assert (await it.post([user("1 2 3")])).status_code == 200  # the session lives on
        record = await it.close()
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "This model's maximum context length is 10 tokens. However, your messages resulted in"
        " 10 tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert record.is_context_exceeded
    assert record.counters["refused_context_length_exceeded"] == 1
    assert len(record.trajectory.turns) == 1


async def test_a_spent_turn_budget_is_a_400_with_its_own_code() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")], session=spec(max_turns=1)) as it:
        await it.ask([user("a")])
        answer = await it.post([user("b")])
        record = await it.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "turn_budget_exhausted")
    assert record.counters["refused_turn_budget_exhausted"] == 1
    assert it.sampler.num_started == 1


async def test_a_tool_message_without_an_id_is_accepted_because_ids_are_never_rendered() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", "{}")), words.reply("ok")]) as it:
        reply = await it.ask([user("a")])
        await it.ask([user("a"), reply, {"role": "tool", "content": "x"}])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


async def test_a_real_socket_serves_the_same_app_on_a_port_of_its_own() -> None:
    words = WordRenderer()
    proxy = ChatCompletionsProxy(ScriptedSampler(script=iter([words.reply("one")])), words)
    async with (
        serve(proxy) as base_url,
        serve(ChatCompletionsProxy(ScriptedSampler(script=iter([])), words)) as other,
    ):
        access = proxy.open(spec())
        assert base_url == access.base_url != other
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {access.api_key}"}) as client:
            whole = await client.post(
                f"{base_url}/chat/completions", json={"messages": [user("a")], "stream": True}
            )
            assert read_events(whole.text)[1]["choices"][0]["delta"] == {"content": "one"}
            assert (await client.get(f"{other}/models")).status_code == 401
        record = await proxy.close(access)
    assert [turn.is_delivered for turn in record.trajectory.turns] == [True]
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{base_url}/models")


async def test_an_address_in_use_is_an_error_before_anything_is_served() -> None:
    words = WordRenderer()
    first, second = (ChatCompletionsProxy(ScriptedSampler(script=iter([])), words) for _ in range(2))
    async with serve(first) as base_url:
        port = int(base_url.removesuffix("/v1").rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match="in use"):
            async with serve(second, ProxyAddress(port=port)):
                pass


class StrictRenderer(WordRenderer):
    """A template that knows no second system message."""

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        raise TemplateError("system messages must come first")


async def test_what_the_template_refuses_is_a_400_with_its_reason() -> None:
    async with rig(renderer=StrictRenderer()) as it:
        answer = await it.post([user("a"), {"role": "system", "content": "b"}])
    assert answer.status_code == 400
    assert "system messages must come first" in answer.json()["error"]["message"]


async def test_malformed_calls_reach_the_agent_as_calls_it_can_answer() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", '{"cmd'))]) as it:
        reply = await it.ask([user("a")])
    [call] = reply["tool_calls"]
    assert call["function"]["name"] == "ls"
    assert '{"cmd' in call["function"]["arguments"]
    assert tool(call, "bad arguments")["tool_call_id"] == "call_0_0"


async def test_arrays_of_the_record_cannot_be_changed() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")]) as it:
        await it.ask([user("a")])
        [turn] = (await it.close()).trajectory.turns
    with pytest.raises(ValueError, match="read-only"):
        turn.completion_ids[0] = np.int32(1)
