"""Where an agent rewrites history the trajectory branches, the cause is named, and no token is lost."""

from collections.abc import Sequence

import orjson
from tests.fakes import WordRenderer
from tests.proxy.rig import Body, Rig, rig, schema, system, tool, user

from pilotage.types import BranchCause, TokenIds, Trajectory

OPENING = [system("be brief"), user("fix it")]


def shape(trajectory: Trajectory) -> list[tuple[int | None, BranchCause | None]]:
    """Return parent and cause of every turn, after checking that causes count the branches."""
    turns = trajectory.turns
    assert len(trajectory.leaves()) == 1 + len(list(trajectory.branch_causes()))
    return [(turn.parent, turn.branch_cause) for turn in turns]


def text_of(words: WordRenderer, ids: TokenIds) -> str:
    """Return the words among `ids`; markers have the ids 0 to 8."""
    return words.decode(i for i in ids.tolist() if i > 8)


async def grow(it: Rig, texts: Sequence[str], opening: Sequence[Body] = OPENING) -> list[Body]:
    """Run one turn for every text, each a user message after the reply; returns the whole history."""
    history = list(opening)
    for text in texts:
        history += [await it.ask(history), user(text)]
    return history


def script(words: WordRenderer, count: int = 8) -> list[list[int]]:
    return [words.reply(f"reply-{i}") for i in range(count)]


async def test_a_rewritten_reply_branches_from_the_last_message_that_still_agrees() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        history = await grow(it, ["a", "b"])
        history[4] = {"role": "assistant", "content": "something else"}
        await it.ask([*history, user("c")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None), (0, BranchCause.HISTORY_REWRITTEN)]
    #      the new branch holds the agent's text as context, and the old turn still holds what was sampled
    assert text_of(words, record.trajectory.turns[2].context_ids) == "asomething elsebc"
    assert record.trajectory.turns[1].completion_ids.tolist() == words.reply("reply-1")


async def test_a_changed_argument_is_a_rewrite_even_if_it_is_only_a_default() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("ls", '{"a": 1}')), words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        reply["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "timeout": null}'
        await it.ask([*OPENING, reply, tool(reply["tool_calls"][0], "x")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.HISTORY_REWRITTEN)]


async def test_a_call_whose_name_the_agent_repaired_is_a_rewrite() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=[words.reply("", ("bash", "{}")), words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        reply["tool_calls"][0]["function"]["name"] = "terminal"
        await it.ask([*OPENING, reply, tool(reply["tool_calls"][0], "x")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.HISTORY_REWRITTEN)]


async def test_a_conversation_without_a_user_message_has_its_first_messages_as_its_opening() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        reply = await it.ask([system("go")])
        await it.ask([system("go"), reply, system("on")])
        await it.ask([system("stop")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None), (None, BranchCause.NEW_CONVERSATION)]


async def test_an_agent_that_only_leaves_reasoning_out_still_extends_the_turn() -> None:
    words = WordRenderer()
    thought = words.reply("hi", reasoning="long thought")
    async with rig(renderer=words, script=[thought, words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        assert reply.pop("reasoning_content") == "long thought"
        await it.ask([*OPENING, reply, user("go on")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None)]


async def test_reasoning_sent_back_as_it_was_extends_the_turn() -> None:
    words = WordRenderer()
    thought = words.reply("hi", reasoning="long thought")
    async with rig(renderer=words, script=[thought, words.reply("ok")], honour_dropped_reasoning=True) as it:
        reply = await it.ask(OPENING)
        await it.ask([*OPENING, reply, user("go on")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None)]


async def test_other_reasoning_branches() -> None:
    words = WordRenderer()
    thought = words.reply("hi", reasoning="long thought")
    async with rig(renderer=words, script=[thought, words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        await it.ask([*OPENING, {**reply, "reasoning_content": "a summary"}, user("go on")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.REASONING_DROPPED)]


async def test_dropped_reasoning_branches_where_the_proxy_is_told_to_honour_it() -> None:
    words = WordRenderer()
    thought = words.reply("hi", reasoning="long thought")
    async with rig(renderer=words, script=[thought, words.reply("ok")], honour_dropped_reasoning=True) as it:
        reply = await it.ask(OPENING)
        await it.ask([*OPENING, {**reply, "reasoning_content": None}, user("go on")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.REASONING_DROPPED)]


async def test_the_same_request_sampled_again_is_a_sibling() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        history = await grow(it, ["a"])
        first = await it.ask(history)
        second = await it.ask(history)
        assert first["content"] != second["content"]
        await it.ask([*history, first, user("b")])  # the history says which of the two the agent kept
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None), (0, BranchCause.RETRY), (1, None)]


async def test_of_two_equal_replies_the_newest_is_extended_and_neither_is_lost() -> None:
    words = WordRenderer()
    same = words.reply("same")
    async with rig(renderer=words, script=[same, same, words.reply("ok")]) as it:
        await it.ask(OPENING)
        reply = await it.ask(OPENING)
        await it.ask([*OPENING, reply, user("b")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.RETRY), (1, None)]


async def test_a_conversation_that_went_on_from_the_older_of_two_equal_replies_is_found() -> None:
    words = WordRenderer()
    same = words.reply("same")
    rest = script(words)
    async with rig(renderer=words, script=[same, rest[0], same, rest[1]]) as it:
        history = await grow(it, ["a", "b"])  # turn 0 says "same", turn 1 goes on from it
        await it.ask(OPENING)  # turn 2 says "same" again
        await it.ask(history)
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None), (None, BranchCause.RETRY), (1, None)]


async def test_other_tools_branch() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        reply = await it.ask(OPENING, tools=[schema("ls")])
        await it.ask([*OPENING, reply, user("b")], tools=[schema("ls"), schema("cat")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.TOOLS_CHANGED)]


async def test_a_summarised_history_is_a_compaction() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        history = await grow(it, ["a", "b", "c"])
        short = [*OPENING, user("summary of a and b"), history[-1]]
        reply = await it.ask(short)
        await it.ask([*short, reply, user("d")])
        record = await it.close()
    assert shape(record.trajectory)[3:] == [(None, BranchCause.COMPACTION), (3, None)]


async def test_another_first_message_is_a_new_conversation_and_the_first_one_goes_on() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        history = await grow(it, ["a"])
        sub = await grow(it, ["x"], [system("sub-agent"), user("look around")])
        await it.ask(history)
        await it.ask(sub)
        record = await it.close()
    assert shape(record.trajectory) == [
        (None, None),
        (None, BranchCause.NEW_CONVERSATION),
        (0, None),  # interleaved, yet neither of them branches
        (1, None),
    ]


async def test_an_agents_own_name_for_a_conversation_tells_equal_openings_apart() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words)) as it:
        await it.ask(OPENING, prompt_cache_key="main")
        await it.post(OPENING, headers={"x-litellm-session-id": "sub"})
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.NEW_CONVERSATION)]


async def test_a_parallel_reply_that_openhands_splits_branches_and_keeps_every_token() -> None:
    words = WordRenderer()
    sampled = words.reply("", ("ls", '{"n": 1}'), ("ls", '{"n'), ("ls", '{"n": 3}'))
    async with rig(renderer=words, script=[sampled, words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        good, bad, later = reply["tool_calls"]
        bad["function"]["arguments"] = orjson.dumps({"_openhands_malformed_tool_call": True}).decode()
        split = [
            {"role": "assistant", "tool_calls": [good, bad]},
            tool(bad, "error"),
            {"role": "assistant", "tool_calls": [later]},
            tool(good, "1"),
            tool(later, "3"),
        ]
        await it.ask([*OPENING, *split])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (None, BranchCause.HISTORY_REWRITTEN)]
    assert record.trajectory.turns[0].completion_ids.tolist() == sampled


async def test_replies_to_parallel_calls_may_come_back_in_any_order() -> None:
    words = WordRenderer()
    sampled = words.reply("", ("ls", '{"n": 1}'), ("ls", '{"n": 2}'))
    async with rig(renderer=words, script=[sampled, words.reply("ok")]) as it:
        reply = await it.ask(OPENING)
        one, two = reply["tool_calls"]
        await it.ask([*OPENING, reply, tool(two, "second"), tool(one, "first")])
        record = await it.close()
    assert shape(record.trajectory) == [(None, None), (0, None)]
    assert text_of(words, record.trajectory.turns[1].context_ids) == "secondfirst"


async def test_memory_grows_with_the_tokens_added_not_with_the_prompts() -> None:
    words = WordRenderer()
    async with rig(renderer=words, script=script(words, 40)) as it:
        history = await grow(it, [f"user-{i}" for i in range(40)])
        record = await it.close()
    turns = record.trajectory.turns
    #      opening: 2 markers, 3 + 3 words and blanks ("be brief", "fix it"), 2 ENDs, ASSISTANT;
    #      every later turn: USER, one word, END, ASSISTANT
    assert [turn.context_ids.size for turn in turns] == [11, *[4] * 39]
    assert record.trajectory.prompt_ids(39).size == 11 + 39 * (2 + 4)
    assert len(history) == 82
