"""Messages and Responses on the wire: shapes, places of faults, and what is refused."""

from collections.abc import MutableMapping
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from tests.fakes import ASSISTANT, END, SYSTEM, TOOL, USER, ScriptedSampler, WordRenderer
from tests.proxy.rig import Body, Connection, Rig, rig, spec

from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import SamplingParams

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
GO: Body = {"role": "user", "content": "go"}

MESSAGES_FAULTS: list[tuple[Body, str]] = [
    ({}, "messages must be a list of at least one message"),
    ({"messages": {}}, "messages must be a list or null, got dict"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role must be 'user', 'assistant' or 'system', got 'tool'",
    ),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0] has type 'image'; this policy reads text only",
    ),
    (
        {
            "messages": [
                GO,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                GO,
            ]
        },
        "messages[1].content[0] has type 'redacted_thinking'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0] has type 'image'",
    ),
    (
        {"messages": [GO, {"role": "assistant", "content": [{"type": "tool_use", "name": "ls"}]}, GO]},
        "messages[1].content[0].input must be an object",
    ),
    (
        {"messages": [GO, {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, GO]},
        "messages[1].content[0].name must be a string",
    ),
    ({"messages": [GO, {"role": "assistant", "content": "I"}]}, "must end with a user message"),
    ({"messages": [GO], "system": [IMAGE]}, "system[0] has type 'image'"),
    (
        {"messages": [GO], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0].type 'bash_20250124' is not supported: offer a tool with a name and an input_schema",
    ),
    ({"messages": [GO], "tools": [{"input_schema": {}}]}, "tools[0] needs a name"),
    (
        {"messages": [GO], "tools": [{"name": "a", "input_schema": 5}]},
        "tools[0].input_schema must be an object",
    ),
    ({"messages": [GO], "mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"messages": [GO], "stream": "yes"}, "stream must be true or false"),
]

RESPONSES_FAULTS: list[tuple[Body, str]] = [
    ({}, "input must be a string or a list of at least one item"),
    ({"input": {}}, "input must be a list or null, got dict"),
    ({"input": [5]}, "input[0] must be an object"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be one of"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0] has type 'input_image'; this policy reads text only",
    ),
    ({"input": [GO, {"type": "item_reference", "id": "x"}]}, "input[1] has type 'item_reference'"),
    ({"input": [GO, {"type": "custom_tool_call", "name": "x"}]}, "input[1] has type 'custom_tool_call'"),
    ({"input": [GO, {"type": "function_call", "name": "x"}]}, "input[1].call_id must be a string"),
    ({"input": [GO, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id must be a string"),
    (
        {"input": "go", "tools": [{"type": "web_search"}]},
        "tools[0].type must be 'function', got 'web_search'",
    ),
    ({"input": "go", "tools": [{"type": "function"}]}, "tools[0] needs a name"),
    ({"input": "go", "instructions": ["x"]}, "instructions must be a string or null, got list"),
    (
        {"input": "go", "previous_response_id": "resp_1"},
        "previous_response_id is not supported: send the whole conversation as input",
    ),
    ({"input": "go", "background": True}, "background is not supported: leave it out"),
    (
        {"input": "go", "include": ["message.output_text.logprobs"]},
        "include[0] 'message.output_text.logprobs' is not supported",
    ),
    ({"input": "go", "text": 5}, "text must be an object"),
]


async def post(it: Rig, path: str, body: Body) -> httpx.Response:
    return await it.client.post(path, json={"model": "policy", **body})


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        *(("/messages", body, complaint) for body, complaint in MESSAGES_FAULTS),
        *(("/messages/count_tokens", body, complaint) for body, complaint in MESSAGES_FAULTS[:5]),
        *(("/responses", body, complaint) for body, complaint in RESPONSES_FAULTS),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_its_place(
    path: str, body: Body, complaint: str
) -> None:
    async with rig() as it:
        answer = await post(it, path, body)
        record = await it.close()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert complaint in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert record.counters[f"refused_{error['code']}"] == 1
    assert it.sampler.num_started == 0


def events_of(text: str) -> list[Body]:
    """Return the events of a stream, each of which must be named as its type says."""
    events: list[Body] = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_stream_of_messages_event_by_event() -> None:
    words = WordRenderer()
    sampled = words.reply("see", ("ls", '{"n": 1}'), reasoning="hm")
    async with rig(renderer=words, script=[sampled]) as it:
        answer = await post(it, "/messages", {"messages": [GO], "stream": True, "max_tokens": 9})
    assert answer.headers["content-type"].startswith("text/event-stream")
    start, *blocks, delta, stop = events_of(answer.text)
    #      USER go END ASSISTANT; THINK hm END_THINK see CALL, 7 words and blanks of the call, END
    message = start["message"]
    assert (message["id"], message["role"], message["content"]) == ("msg_rollout-1-0", "assistant", [])
    assert (message["stop_reason"], message["usage"]["input_tokens"]) == (None, 4)
    opened = [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0_0", "name": "ls", "input": {}},
    ]
    deltas = [
        [
            {"type": "thinking_delta", "thinking": "hm"},
            {"type": "signature_delta", "signature": "unsigned"},
        ],
        [{"type": "text_delta", "text": "see"}],
        [{"type": "input_json_delta", "partial_json": '{"n":1}'}],
    ]
    expected: list[Body] = []
    for index, (block, parts) in enumerate(zip(opened, deltas, strict=True)):
        expected.append({"type": "content_block_start", "index": index, "content_block": block})
        expected += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
        expected.append({"type": "content_block_stop", "index": index})
    assert blocks == expected
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(sampled)
    assert stop == {"type": "message_stop"}


async def test_a_stream_of_responses_event_by_event() -> None:
    words = WordRenderer()
    sampled = words.reply("see", ("ls", '{"n": 1}'), reasoning="hm")
    async with rig(renderer=words, script=[sampled]) as it:
        answer = await post(it, "/responses", {"input": "go", "stream": True})
    events = events_of(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = [name.replace("output_text", "reasoning_text") for name in text]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = ["created", "in_progress"]
    for filling in (thought, text, call):
        expected += ["output_item.added", *filling, "output_item.done"]
    assert [event["type"] for event in events] == [f"response.{name}" for name in [*expected, "completed"]]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == done
    assert [item["id"] for item in done] == ["rs_rollout-1-0", "msg_rollout-1-0", "fc_call_0_0"]
    assert [event["output_index"] for event in events[2:-1]] == [*[0] * 6, *[1] * 6, *[2] * 4]
    assert (final["id"], final["status"], final["incomplete_details"]) == (
        "resp_rollout-1-0",
        "completed",
        None,
    )
    assert final["usage"]["output_tokens"] == len(sampled)
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


async def test_a_cut_response_is_incomplete_and_says_why() -> None:
    words = WordRenderer()
    session = spec(sampling=SamplingParams(max_tokens=2))
    async with rig(renderer=words, script=[words.reply("a b")] * 2, session=session) as it:
        whole = (await post(it, "/responses", {"input": "go"})).json()
        stream = events_of((await post(it, "/responses", {"input": "go", "stream": True})).text)
    for response in (whole, stream[-1]["response"]):
        assert response["status"] == response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream[-1]["type"] == "response.incomplete"


async def test_anthropics_key_header_and_a_bearer_key_both_name_the_session() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")] * 3) as it:
        key = it.access.api_key
        async with httpx.AsyncClient(transport=httpx.ASGITransport(it.proxy.app)) as stranger:

            async def status(**headers: str) -> httpx.Response:
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                body = {"messages": [GO], "max_tokens": 9}
                return await stranger.post("http://proxy/v1/messages", json=body, headers=sent)

            assert (await status(x_api_key=key)).status_code == 200
            assert (await status(authorization=f"Bearer {key}")).status_code == 200
            assert (await status(authorization="Bearer other", x_api_key=key)).status_code == 200
            refused = await status(x_api_key="other")
    assert refused.status_code == 401
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "authentication_error"
    assert key not in refused.text


async def test_tokens_are_counted_as_the_next_turn_will_be_given_them() -> None:
    words = WordRenderer()
    script = [words.reply("", ("ls", "{}")), words.reply("ok")]
    async with rig(renderer=words, script=script) as it:
        client: Any = anthropic.AsyncAnthropic(
            base_url=it.access.base_url.removesuffix("/v1"), api_key=it.access.api_key, http_client=it.client
        )
        tools = [{"name": "ls", "input_schema": {"type": "object"}}]
        messages: list[Body] = [GO]
        counted: list[int] = []
        for _ in range(2):
            asked = {"model": "policy", "system": "be brief", "messages": messages, "tools": tools}
            counted.append((await client.messages.count_tokens(**asked)).input_tokens)
            answer = await client.messages.create(**asked, max_tokens=9)
            results = [{"type": "tool_result", "tool_use_id": "call_0_0", "content": "a b c"}]
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results},
            ]
        record = await it.close()
    assert counted == [call.prompt_ids.size for call in it.sampler.calls]
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0]  # counting records nothing


async def test_results_and_text_of_one_user_message_are_messages_of_their_own() -> None:
    words = WordRenderer()
    results: list[Body] = [
        {"type": "tool_result", "tool_use_id": "call_0_0", "content": "one"},
        {"type": "tool_result", "tool_use_id": "call_0_1", "is_error": True},
        {"type": "text", "text": "go"},
        {"type": "text", "text": "on", "cache_control": {"type": "ephemeral"}},
    ]
    script = [words.reply("", ("ls", "{}"), ("ls", "{}")), words.reply("ok")]
    async with rig(renderer=words, script=script) as it:
        reply = (await post(it, "/messages", {"messages": [GO]})).json()["content"]
        history = [GO, {"role": "assistant", "content": reply}, {"role": "user", "content": results}]
        await post(it, "/messages", {"messages": history})
        turn = (await it.close()).trajectory.turns[1]
    assert turn.parent == 0
    assert turn.context_ids.tolist() == [
        *[TOOL, *words.encode("one"), END],
        *[TOOL, END],
        *[USER, *words.encode("go\non"), END, ASSISTANT],
    ]


async def test_a_system_message_in_the_middle_stays_where_it_is() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("ok")]) as it:
        reminder = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
        await post(it, "/messages", {"system": "one", "messages": [GO, reminder]})
        [turn] = (await it.close()).trajectory.turns
    assert turn.context_ids.tolist() == [
        *[SYSTEM, *words.encode("one"), END],
        *[USER, *words.encode("go"), END],
        *[SYSTEM, *words.encode("be brief"), END, ASSISTANT],
    ]


async def test_a_rewritten_number_of_a_tool_call_is_another_message_though_python_finds_it_equal() -> None:
    words = WordRenderer()
    async with rig(
        renderer=words, script=[words.reply("", ("ls", '{"n": 1}')), *[words.reply("ok")] * 2]
    ) as it:
        [block] = (await post(it, "/messages", {"messages": [GO]})).json()["content"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": ""}]}
        for n in (1, True):
            reply = {"role": "assistant", "content": [block | {"input": {"n": n}}]}
            await post(it, "/messages", {"messages": [GO, reply, result]})
        record = await it.close()
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0, None]


async def test_instructions_and_leading_system_items_are_one_system_message() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("ok"), words.reply("ok")]) as it:
        items = [{"role": "developer", "content": [{"type": "input_text", "text": "b"}]}, GO]
        await post(it, "/responses", {"instructions": "a", "input": items})
        await post(it, "/responses", {"instructions": "c", "input": items})
        turns = (await it.close()).trajectory.turns
    opening = [[SYSTEM, *words.encode(f"{text}\n\nb"), END] for text in ("a", "c")]
    rest = [USER, *words.encode("go"), END, ASSISTANT]
    assert [turn.context_ids.tolist() for turn in turns] == [[*opening[0], *rest], [*opening[1], *rest]]


async def test_two_answers_in_a_row_are_two_messages() -> None:
    words = WordRenderer()
    script = [words.reply("one", reasoning="hm"), words.reply("two"), words.reply("three")]
    async with rig(renderer=words, script=script) as it:
        items: list[Body] = [GO]
        for _ in range(3):
            items += (await post(it, "/responses", {"input": items})).json()["output"]
        record = await it.close()
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0, 1]


async def test_a_summary_instead_of_the_reasoning_is_other_reasoning_and_none_is_dropped_reasoning() -> None:
    words = WordRenderer()
    async with rig(
        renderer=words, script=[words.reply("one", reasoning="hm"), *[words.reply("ok")] * 2]
    ) as it:
        thought, reply = (await post(it, "/responses", {"input": "go"})).json()["output"]
        without = {**thought, "content": None, "encrypted_content": None}
        await post(it, "/responses", {"input": [GO, without, reply, GO]})
        summary = {**without, "summary": [{"type": "summary_text", "text": "in short"}]}
        await post(it, "/responses", {"input": [GO, summary, reply, GO]})
        record = await it.close()
    assert [turn.parent for turn in record.trajectory.turns] == [None, 0, None]


async def test_a_response_repeats_what_the_recipe_samples_with_and_what_was_offered() -> None:
    words = WordRenderer()
    tools = [{"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": True}]
    session = spec(sampling=SamplingParams(temperature=0.7, max_tokens=50))
    async with rig(renderer=words, script=[words.reply("ok")], session=session) as it:
        body = {"input": "go", "temperature": 0.1, "tools": tools, "metadata": {"a": "b"}}
        response = (await post(it, "/responses", body)).json()
    assert (response["temperature"], response["max_output_tokens"]) == (0.7, 50)
    assert (response["tools"], response["metadata"]) == (tools, {"a": "b"})


@pytest.mark.parametrize("path", ["/messages", "/responses"])
async def test_a_turn_is_recorded_before_the_first_byte_of_its_stream(path: str) -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("one")]) as it:
        records: list[int] = []

        class Watching(Connection):
            async def _send(self, message: MutableMapping[str, Any]) -> None:
                if not self.sent:
                    records.append(len((await it.close()).trajectory.turns))
                await super()._send(message)

        body: Body = {"messages": [GO], "input": "go", "stream": True}
        await Watching(it.proxy, it.access.api_key, body, path=f"/v1{path}").run()
    assert records == [1]


async def test_a_request_for_a_websocket_is_sent_to_http() -> None:
    proxy = ChatCompletionsProxy(ScriptedSampler(script=iter([])), WordRenderer())
    async with serve(proxy) as base_url, httpx.AsyncClient() as client:
        upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        upgrade |= {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        assert (await client.get(f"{base_url}/responses", headers=upgrade)).status_code == 426
        assert (await client.get(f"{base_url}/responses")).status_code == 405


async def test_one_session_may_speak_every_dialect_in_one_conversation() -> None:
    words = WordRenderer()
    sampler = ScriptedSampler(script=iter([words.reply("one"), words.reply("two"), words.reply("three")]))
    async with rig(renderer=words, sampler=sampler) as it:
        assert isinstance(it.proxy, ChatCompletionsProxy)
        await it.ask([GO])
        one = {"role": "assistant", "content": "one"}
        await post(it, "/messages", {"messages": [GO, one, GO]})
        two = {"role": "assistant", "content": "two"}
        await post(it, "/responses", {"input": [GO, one, GO, two, GO]})
        assert [turn.parent for turn in (await it.close()).trajectory.turns] == [None, 0, 1]
