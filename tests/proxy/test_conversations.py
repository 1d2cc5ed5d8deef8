"""Token-exactness: what is recorded is what was sampled, and a prompt is the record plus new messages."""

import orjson
import pytest
from tests.fakes import ASSISTANT, END, TOOL, USER, WordRenderer
from tests.proxy.rig import Body, rig, schema, spec, system, tool, user

from pilotage.types import FinishReason, SamplingParams

EMPTY_SPELLINGS: list[Body] = [{"content": None}, {"content": ""}, {}, {"content": []}, {"content": "\n"}]


async def test_a_prompt_is_the_recorded_ids_and_the_encoding_of_the_new_messages_only() -> None:
    words = WordRenderer()
    first, second = words.reply("", ("ls", "{}")), words.reply("done")
    async with rig(renderer=words, script=[first, second]) as it:
        messages = [system("be brief"), user("list")]
        reply = await it.ask(messages)
        await it.ask([*messages, reply, tool(reply["tool_calls"][0], "a.py")])
        record = await it.close()

    opening = words.render_prompt([], [])[:0].tolist() + it.sampler.calls[0].prompt_ids.tolist()
    #        the first prompt, the sampled turn with its stop token, then only the tool message
    exact = [*opening, *first, TOOL, *words.encode("a.py"), END, ASSISTANT]
    assert it.sampler.calls[1].prompt_ids.tolist() == exact
    assert record.trajectory.prompt_ids(1).tolist() == exact
    assert record.trajectory.turns[1].context_ids.tolist() == [TOOL, *words.encode("a.py"), END, ASSISTANT]
    assert [turn.completion_ids.tolist() for turn in record.trajectory.turns] == [first, second]
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0]


async def test_a_turn_cut_by_its_length_is_closed_by_context_that_was_not_sampled() -> None:
    words = WordRenderer()
    cut = words.reply("one two", is_closed=False)  # one, blank, two: no stop token
    async with rig(renderer=words, script=[cut, words.reply("ok")]) as it:
        answer = await it.post([user("go")])
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        await it.ask([user("go"), answer.json()["choices"][0]["message"], user("on")])
        record = await it.close()

    first, second = record.trajectory.turns
    assert (first.finish_reason, first.completion_ids.tolist()) == (FinishReason.LENGTH, cut)
    assert second.context_ids.tolist() == [END, USER, *words.encode("on"), END, ASSISTANT]


@pytest.mark.parametrize("spelling", EMPTY_SPELLINGS)
async def test_null_empty_and_missing_content_of_a_resent_reply_are_the_same(spelling: Body) -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", "{}")), words.reply("ok")]) as it:
        reply = await it.ask([user("go")])
        resent = {key: value for key, value in reply.items() if key != "content"} | spelling
        await it.ask([user("go"), resent, tool(reply["tool_calls"][0], "x")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path":"caf\\u00e9","deep":{"b":2,"a":[1,2]}}',  # other escapes and spacing
        '{ "deep": {"a": [1, 2], "b": 2}, "path": "café" }',  # other key order
    ],
)
async def test_arguments_match_in_any_spelling_of_the_same_json(arguments: str) -> None:
    words = WordRenderer()
    sampled = words.reply("", ("open", '{"path": "café", "deep": {"b": 2, "a": [1, 2]}}'))
    async with rig(renderer=words, script=[sampled, words.reply("ok")]) as it:
        call = (await it.ask([user("go")]))["tool_calls"][0]
        function = {"name": "open", "arguments": arguments}
        resent = {"role": "assistant", "tool_calls": [{**call, "id": "mine", "function": function}]}
        await it.ask([user("go"), resent, {"role": "tool", "tool_call_id": "mine", "content": "x"}])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


@pytest.mark.parametrize(
    ("sampled", "sent", "is_same"),
    [
        ('{"n": 1.0}', '{"n": 1}', True),  # JSON.stringify(JSON.parse(...))
        ('{"n": [1, -2.0, 1e3]}', '{"n": [1, -2, 1000]}', True),
        ('{"n": 1.5}', '{"n": 1}', False),
        ('{"n": 1.0}', '{"n": true}', False),
        ('{"n": 1.0}', '{"n": "1"}', False),
        ('{"n": 1.0}', '{"n": 1', False),
    ],
)
async def test_a_float_that_comes_back_as_the_integer_it_is_is_the_same_number(
    sampled: str, sent: str, is_same: bool
) -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", sampled)), words.reply("ok")]) as it:
        reply = await it.ask([user("go")])
        reply["tool_calls"][0]["function"]["arguments"] = sent
        await it.ask([user("go"), reply, tool(reply["tool_calls"][0], "x")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0 if is_same else None]


async def test_text_parts_and_the_name_on_tool_messages_do_not_matter() -> None:
    words = WordRenderer()
    script = [words.reply("", ("ls", "{}")), words.reply("one"), words.reply("two")]
    async with rig(renderer=words, script=script) as it:
        opening = [system("a b"), user("go")]
        reply = await it.ask(opening)
        result = tool(reply["tool_calls"][0], "x")
        answer = await it.ask([*opening, reply, result])
        parts: list[Body] = [
            {"role": "system", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {**reply, "content": []},
            {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "one"}]},
        ]
        assert answer["content"] == "one"
        await it.ask([*parts, user("more")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0, 1]


async def test_the_openhands_placeholder_stands_for_the_malformed_call_that_was_sampled() -> None:
    words = WordRenderer()
    sampled = words.reply("", ("ls", '{"cmd": "ls'))
    async with rig(renderer=words, script=[sampled, words.reply("ok")]) as it:
        reply = await it.ask([user("go")])
        [call] = reply["tool_calls"]
        with pytest.raises(ValueError, match=r"unexpected end of data"):
            orjson.loads(call["function"]["arguments"])
        placeholder = orjson.dumps({"_openhands_malformed_tool_call": True, "error": "no JSON"}).decode()
        call["function"]["arguments"] = placeholder
        await it.ask([user("go"), reply, tool(call, "error")])
        record = await it.close()

    assert [turn.parent for turn in record.trajectory.turns] == [None, 0]
    assert it.sampler.calls[1].prompt_ids.tolist()[4 : 4 + len(sampled)] == sampled
    assert record.counters["malformed_calls"] == record.trajectory.turns[0].malformed_calls == 1


async def test_the_placeholder_does_not_stand_for_a_good_call() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", "{}")), words.reply("ok")]) as it:
        reply = await it.ask([user("go")])
        reply["tool_calls"][0]["function"]["arguments"] = '{"_openhands_malformed_tool_call": true}'
        await it.ask([user("go"), reply, tool(reply["tool_calls"][0], "error")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, None]


async def test_echoed_arguments_that_are_no_json_are_accepted_as_text() -> None:
    words = WordRenderer()
    broken = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a'}}
    history = [user("go"), {"role": "assistant", "tool_calls": [broken]}, tool(broken, "bad")]
    async with rig(renderer=words, script=[words.reply("ok")]) as it:
        assert (await it.post(history)).status_code == 200


async def test_assistant_messages_that_were_not_sampled_here_are_context() -> None:
    words = WordRenderer()
    shown = {"role": "assistant", "content": "shown"}
    async with rig(renderer=words, script=[words.reply("mine")]) as it:
        await it.ask([user("a"), shown, user("b")])
        [turn] = (await it.close()).trajectory.turns

    example = [ASSISTANT, *words.encode("shown"), END]
    assert turn.context_ids.tolist() == [
        *[USER, *words.encode("a"), END],
        *example,
        *[USER, *words.encode("b"), END, ASSISTANT],
    ]
    assert turn.completion_ids.tolist() == words.reply("mine")


async def test_an_empty_list_of_tools_is_the_same_as_none() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one"), words.reply("two")]) as it:
        reply = await it.ask([user("a")], tools=[])
        await it.ask([user("a"), reply, user("b")])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


async def test_tools_in_another_key_order_are_the_same_tools() -> None:
    words = WordRenderer()
    offered = schema("ls", path={"type": "string", "description": "where"})
    function = dict(reversed(offered["function"].items()))
    async with rig(renderer=words, script=[words.reply("one"), words.reply("two")]) as it:
        reply = await it.ask([user("a")], tools=[offered])
        await it.ask([user("a"), reply, user("b")], tools=[{"function": function, "type": "function"}])
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0]


async def test_a_terminals_undecodable_bytes_do_not_end_the_rollout() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("ok")]) as it:
        body = b'{"messages": [{"role": "user", "content": "a\\udc80b \\ud83d\\ude00"}]}'
        answer = await it.client.post("/chat/completions", content=body)
        assert answer.status_code == 200
        [turn] = (await it.close()).trajectory.turns
    assert words.decode(turn.context_ids[1:-2].tolist()) == "a�b \U0001f600"


async def test_each_turn_draws_from_the_sessions_seed_and_its_own_index() -> None:
    words = WordRenderer()
    script = [words.reply("one"), words.reply("two"), words.reply("three")]
    session = spec(sampling=SamplingParams(seed=7, temperature=0.5))
    async with rig(renderer=words, script=script, session=session) as it:
        for text in ("a", "b", "c"):
            await it.ask([user(text)])
    assert [(call.params.seed, call.turn_index) for call in it.sampler.calls] == [(7, 0), (7, 1), (7, 2)]
    assert {call.session_id for call in it.sampler.calls} == {"rollout-1"}


async def test_every_token_carries_the_version_that_sampled_it() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one"), words.reply("two")]) as it:
        reply = await it.ask([user("a")])
        it.sampler.weights_version = 5
        await it.ask([user("a"), reply, user("b")])
        turns = (await it.close()).trajectory.turns
    assert [turn.weights_versions.tolist() for turn in turns] == [[0, 0], [5, 5]]


async def test_a_large_first_prompt_is_encoded_beside_the_event_loop_to_the_same_ids() -> None:
    words = WordRenderer()
    text = "word " * 5_000
    async with rig(renderer=words, script=[words.reply("ok")]) as it:
        await it.ask([user(text)])
    assert it.sampler.calls[0].prompt_ids.tolist() == [USER, *words.encode(text), END, ASSISTANT]
