"""Reading sampled ids, and closing turns that were cut."""

import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.conversations import TOOLS, assistant, call, texts, tool, typed_calls, user

from pilotage.rendering import (
    MALFORMED_NAME,
    ChatML,
    Dialect,
    Markup,
    Qwen3,
    Qwen35,
    TemplateRenderer,
    ThinkBlock,
    TokenizerFile,
)
from pilotage.types import Message, ParsedReply, Role, TokenIds, ToolCall

LS = '{"name": "terminal", "arguments": {"command": "ls"}}'
XML_LS = "\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>\n"


@pytest.fixture(scope="session")
def chatml(tiny_tokenizer: TokenizerFile) -> TemplateRenderer:
    return TemplateRenderer(tokenizer=tiny_tokenizer, dialect=ChatML())


def read(renderer: TemplateRenderer, tokenizer: TokenizerFile, *segments: Markup | str) -> ParsedReply:
    return renderer.parse(tokenizer.encode(segments), TOOLS)


def call_of(text: str) -> list[Markup | str]:
    return [Markup("<tool_call>"), text, Markup("</tool_call>")]


def test_text_before_between_and_after_calls_is_kept_in_order(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    reply = read(
        chatml,
        tiny_tokenizer,
        *("First.\n", *call_of(LS), "\nthen\n", *call_of(LS), "\nlast", Markup("<|im_end|>")),
    )
    made = [ToolCall(id=f"call_{n}", name="terminal", arguments='{"command": "ls"}') for n in range(2)]
    assert reply == ParsedReply(message=assistant("First.\nthen\nlast", *made))


def test_a_bad_call_beside_a_good_one_does_not_take_it_along(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    broken = '{"name": "terminal", "arguments": {"command": "ls'
    reply = read(chatml, tiny_tokenizer, *call_of(LS), *call_of(broken), *call_of(LS), Markup("<|im_end|>"))
    good = '{"command": "ls"}'
    assert [made.arguments for made in reply.message.tool_calls] == [good, broken, good]
    assert reply.malformed_calls == 1


def test_a_marker_spelled_in_ordinary_tokens_is_text(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    argument = json.dumps({"name": "terminal", "arguments": {"command": "echo '</tool_call>'"}})
    reply = read(chatml, tiny_tokenizer, "<tool_call>{}</tool_call>", *call_of(argument))
    assert reply.message.content == "<tool_call>{}</tool_call>"
    [made] = reply.message.tool_calls
    assert json.loads(made.arguments) == {"command": "echo '</tool_call>'"}
    assert reply.malformed_calls == 0


def test_a_call_cut_by_length_is_malformed_even_where_its_text_is_whole(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    reply = read(chatml, tiny_tokenizer, "So: ", Markup("<tool_call>"), LS)
    [made] = reply.message.tool_calls
    assert (reply.message.content, made.name, reply.malformed_calls) == ("So: ", "terminal", 1)
    assert json.loads(made.arguments) == LS  # a JSON string: no tool can run on it


def test_a_call_opened_inside_an_open_call_ends_it(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    reply = read(chatml, tiny_tokenizer, Markup("<tool_call>"), "oh", *call_of(LS), Markup("<|im_end|>"))
    assert [made.name for made in reply.message.tool_calls] == [MALFORMED_NAME, "terminal"]
    assert reply.malformed_calls == 1


def test_a_stray_closing_marker_and_an_end_marker_in_mid_reply_stay_visible(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    reply = read(chatml, tiny_tokenizer, Markup("a</tool_call>b<|im_end|>c<|endoftext|>"))
    assert reply.message.content == "a</tool_call>b<|im_end|>c"


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|endoftext|>"])
def test_a_stop_token_is_no_part_of_the_content(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile, ending: str
) -> None:
    assert read(chatml, tiny_tokenizer, "ok", Markup(ending)).message.content == "ok"
    assert read(chatml, tiny_tokenizer, Markup(ending)) == ParsedReply(message=assistant(""))


def test_a_cut_turn_is_closed_by_the_suffix_and_an_ended_one_is_not(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    end_id, other_end_id = chatml.stop_token_ids
    assert (end_id, other_end_id) == (257, 260)
    following = "\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n"
    for last_id, closing in (
        (end_id, ""),
        (65, "<|im_end|>"),
        (other_end_id, "<|im_end|>"),
        (None, "<|im_end|>"),
    ):
        suffix = chatml.render_suffix(last_id, [tool("out")], TOOLS)
        assert suffix.tolist() == tiny_tokenizer.encode([Markup(closing + following)]).tolist()


def test_a_run_of_tool_messages_is_one_user_turn_of_qwen(qwen_tokenizer: TokenizerFile) -> None:
    renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=Qwen3())
    suffix = renderer.render_suffix(renderer.stop_token_ids[0], [tool("a"), tool("b"), user("and?")], TOOLS)
    assert renderer.decode(suffix) == (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_assistant_message_that_was_not_sampled_here_is_context_of_the_suffix(
    chatml: TemplateRenderer, tiny_tokenizer: TokenizerFile
) -> None:
    suffix = chatml.render_suffix(257, [user("a"), assistant("b", call(command="ls")), tool("c")], TOOLS)
    expected = (
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<tool_call>"
        f"{LS}</tool_call><|im_end|>\n<|im_start|>tool\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert suffix.tolist() == tiny_tokenizer.encode([Markup(expected)]).tolist()


def test_a_compact_tool_line_shows_names_only(chatml: TemplateRenderer) -> None:
    prompt = chatml.render_prompt([Message(role=Role.SYSTEM, content="Find it."), user("x")], TOOLS)
    assert chatml.decode(prompt) == (
        "<|im_start|>system\nFind it.\ntool terminal(command, timeout, is_input)\n"
        "tool localization_finish(locations)<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


REASONING = [
    # think block of the prompt, what is sampled, reasoning, content
    (ThinkBlock.ABSENT, "<think>\nHm.\n</think>\n\nOk.", "Hm.", "Ok."),
    (ThinkBlock.ABSENT, "\n<think>\nHm.</think>Ok.", "Hm.", "Ok."),
    (ThinkBlock.ABSENT, "Ok.", "", "Ok."),
    (ThinkBlock.ABSENT, "Ok. <think>late</think>", "", "Ok. <think>late</think>"),
    (ThinkBlock.ABSENT, "Ok.</think>So.", "", "Ok.</think>So."),
    (ThinkBlock.ABSENT, "<think>\nnever closed", "never closed", ""),
    (ThinkBlock.OPEN, "Hm.\n</think>\n\nOk.", "Hm.", "Ok."),
    (ThinkBlock.OPEN, "\n\n</think>\n\nOk.", "", "Ok."),
    (ThinkBlock.OPEN, "all inside", "all inside", ""),
    (ThinkBlock.OPEN, "", "", ""),
    (ThinkBlock.EMPTY, "Ok.", "", "Ok."),
    (ThinkBlock.EMPTY, "<think>\nHm.\n</think>\n\nOk.", "Hm.", "Ok."),
]


@pytest.mark.parametrize(("think_block", "sampled", "reasoning", "content"), REASONING)
def test_reasoning_is_split_from_content_and_neither_is_lost(
    think_block: ThinkBlock, sampled: str, reasoning: str, content: str, qwen_tokenizer: TokenizerFile
) -> None:
    for dialect in (Qwen3(think_block=think_block), Qwen35(think_block=think_block)):
        renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=dialect)
        reply = read(renderer, qwen_tokenizer, Markup(sampled + "<|im_end|>"))
        assert (reply.message.reasoning, reply.message.content) == (reasoning, content)


def test_a_call_made_in_a_think_block_that_is_never_closed_is_a_call(qwen_tokenizer: TokenizerFile) -> None:
    renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=Qwen35(think_block=ThinkBlock.OPEN))
    reply = read(renderer, qwen_tokenizer, "Hm.\n", *call_of(XML_LS), Markup("<|im_end|>"))
    made = ToolCall(id="call_0", name="terminal", arguments='{"command": "ls"}')
    assert reply == ParsedReply(message=assistant("", made, reasoning="Hm."))


def test_a_call_that_is_only_thought_of_is_reasoning(qwen_tokenizer: TokenizerFile) -> None:
    renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=Qwen35(think_block=ThinkBlock.OPEN))
    reply = read(renderer, qwen_tokenizer, *call_of(XML_LS), Markup("</think>\n\nNo.<|im_end|>"))
    assert reply.message.tool_calls == ()
    assert (reply.message.reasoning, reply.message.content) == (f"<tool_call>{XML_LS}</tool_call>", "No.")


@pytest.mark.parametrize(
    ("dialect", "has_reasoning"),
    [
        (ChatML(), False),
        (Qwen3(), False),
        (Qwen3(), True),
        (Qwen3(splits_reasoning=False), False),
        (Qwen35(think_block=ThinkBlock.OPEN), True),
        (Qwen35(think_block=ThinkBlock.EMPTY), False),
    ],
)
def test_a_rendered_reply_is_read_as_the_message_that_it_was(
    dialect: Dialect, has_reasoning: bool, qwen_tokenizer: TokenizerFile
) -> None:
    renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=dialect)

    @given(texts, typed_calls(), texts.filter(bool) if has_reasoning else st.just(""))
    @settings(max_examples=30, deadline=None)
    def holds(content: str, made: list[ToolCall], reasoning: str) -> None:
        message = assistant(content, *made, reasoning=reasoning)
        prompt = renderer.render_prompt([user()], TOOLS)
        whole = renderer.render_prompt([user(), message], TOOLS).tolist()
        last_end = len(whole) - 1 - whole[::-1].index(renderer.stop_token_ids[0])
        sampled = np.array(whole[prompt.size : last_end + 1], np.int32)

        reply = renderer.parse(sampled, TOOLS)

        assert reply.malformed_calls == 0
        assert as_values(reply.message) == as_values(message)

    holds()


def as_values(message: Message) -> tuple[object, ...]:
    """What two messages share if they say the same; the Qwen tokenizer composes characters (NFC)."""
    made = [
        (made.name, json.loads(unicodedata.normalize("NFC", made.arguments))) for made in message.tool_calls
    ]
    return (
        unicodedata.normalize("NFC", message.content),
        unicodedata.normalize("NFC", message.reasoning),
        made,
    )


@given(st.lists(st.integers(0, 300), max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_ids_make_parsing_raise_and_the_ids_are_not_touched(
    chatml: TemplateRenderer, ids: list[int]
) -> None:
    sampled: TokenIds = np.array(ids, np.int32)
    reply = chatml.parse(sampled, TOOLS)
    assert sampled.tolist() == ids
    # Every opening marker is a call, good or malformed; none is lost.
    assert len(reply.message.tool_calls) == ids.count(258)


markers = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", "word", "word")


@given(st.lists(st.sampled_from(markers), max_size=12), st.sampled_from(ThinkBlock))
@settings(max_examples=80, deadline=None)
def test_no_arrangement_of_markers_loses_a_word_or_says_it_twice(
    qwen_tokenizer: TokenizerFile, pieces: list[str], think_block: ThinkBlock
) -> None:
    numbered = [f"word{index};" if piece == "word" else piece for index, piece in enumerate(pieces)]
    for dialect in (Qwen3(think_block=think_block), Qwen35(think_block=think_block)):
        renderer = TemplateRenderer(tokenizer=qwen_tokenizer, dialect=dialect)
        reply = read(renderer, qwen_tokenizer, *(Markup(piece) for piece in numbered))
        message = reply.message
        everything = [message.content, message.reasoning, *(made.arguments for made in message.tool_calls)]
        for piece in numbered:
            if piece.startswith("word"):
                assert "".join(everything).count(piece) == 1
        assert reply.malformed_calls == len(message.tool_calls) <= pieces.count("<tool_call>")
