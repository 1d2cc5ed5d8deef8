"""Renderers against the official chat templates, as transformers renders and encodes them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rendering.conversations import (
    TOOLS,
    Conversation,
    assistant,
    call,
    dialogues,
    flatten,
    scripted_loop,
    system,
    tool,
    tool_loops,
    user,
)
from tests.rendering.official import OfficialTemplate

from pilotage.rendering import ChatTemplate, TemplateRenderer, TokenizerFile
from pilotage.rendering.families import choose_dialect

Official = Callable[[str], OfficialTemplate]

MODES = [
    ("chatml", None),
    ("qwen3", True),
    ("qwen3", False),
    ("qwen3_instruct_2507", None),
    ("qwen3_5_think", None),
    ("qwen3_5_think", True),
    ("qwen3_5_think", False),
    ("qwen3_5_nothink", None),
    ("qwen3_6", True),
    ("qwen3_6", False),
]
# Where each template is append-only over a loop of calls after one query, and with what reasoning.
APPEND_ONLY = [
    ("chatml", None, False),
    ("qwen3_instruct_2507", None, False),
    ("qwen3", True, True),
    ("qwen3_5_think", True, True),
    ("qwen3_5_think", False, False),
    ("qwen3_5_nothink", None, False),
    ("qwen3_6", True, True),
    ("qwen3_6", False, False),
]
EMPTY_THINK = "<think>\n\n</think>\n\n"
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def renderer_of(
    official: OfficialTemplate, tokenizer: TokenizerFile, enable_thinking: bool | None
) -> TemplateRenderer:
    dialect = choose_dialect(ChatTemplate(official.source), enable_thinking=enable_thinking)
    return TemplateRenderer(tokenizer=tokenizer, dialect=dialect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Plays conversations as a session would: each turn extends the recorded ids."""

    official: OfficialTemplate
    renderer: TemplateRenderer
    enable_thinking: bool | None

    def sampled(self, conversation: Conversation, turn: int) -> list[int]:
        """Ids of the reply as the template writes it after its own generation prompt, end marker included."""
        before = conversation.before(turn)
        prompt = self.official.ids(before, TOOLS, enable_thinking=self.enable_thinking)
        whole = self.official.ids(
            [*before, conversation.turns[turn][0]],
            TOOLS,
            enable_thinking=self.enable_thinking,
            add_generation_prompt=False,
        )
        assert whole[: len(prompt)] == prompt
        end_id = self.renderer.stop_token_ids[0]
        last_end = len(whole) - 1 - whole[::-1].index(end_id)
        return whole[len(prompt) : last_end + 1]

    def play(self, conversation: Conversation, sampled: Callable[[int], list[int]]) -> list[list[int]]:
        """Return the prompt ids of turn 1 to the one after the last."""
        ids = self.renderer.render_prompt(conversation.opening, TOOLS)
        prompts = [ids.tolist()]
        for turn, (_, answers) in enumerate(conversation.turns):
            reply = np.array(sampled(turn), np.int32)
            suffix = self.renderer.render_suffix(int(reply[-1]), answers, TOOLS)
            ids = np.concatenate([ids, reply, suffix])
            prompts.append(ids.tolist())
        return prompts


@pytest.mark.parametrize(("name", "enable_thinking"), MODES)
def test_a_whole_conversation_is_rendered_as_the_official_template_renders_it(
    name: str, enable_thinking: bool | None, official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    template = official(name)
    renderer = renderer_of(template, qwen_tokenizer, enable_thinking)

    @FEW
    @given(st.one_of(dialogues(reasoning=True), tool_loops(reasoning=False)), st.sampled_from([TOOLS, ()]))
    def holds(conversation: Conversation, tools: tuple[()] | tuple[object, ...]) -> None:
        offered = TOOLS if tools else ()
        messages = flatten(conversation)
        expected = template.ids(messages, offered, enable_thinking=enable_thinking)
        assert renderer.render_prompt(messages, offered).tolist() == expected

    holds()


@pytest.mark.parametrize(("name", "enable_thinking", "has_reasoning"), APPEND_ONLY)
def test_1_to_8_recorded_turns_are_the_full_render_where_the_template_is_append_only(
    name: str,
    enable_thinking: bool | None,
    has_reasoning: bool,
    official: Official,
    qwen_tokenizer: TokenizerFile,
) -> None:
    template = official(name)
    recording = Recording(
        official=template,
        renderer=renderer_of(template, qwen_tokenizer, enable_thinking),
        enable_thinking=enable_thinking,
    )
    conversation = scripted_loop(
        8, content="Let me look.", reasoning="It may be\nthere." if has_reasoning else ""
    )

    prompts = recording.play(conversation, lambda turn: recording.sampled(conversation, turn))

    assert len(prompts) == 9
    for turn, prompt in enumerate(prompts):
        expected = template.ids(conversation.before(turn), TOOLS, enable_thinking=enable_thinking)
        assert prompt == expected, f"turn {turn}"


@pytest.mark.parametrize(("name", "enable_thinking", "has_reasoning"), APPEND_ONLY)
def test_any_tool_loop_extends_to_the_full_render_where_the_template_is_append_only(
    name: str,
    enable_thinking: bool | None,
    has_reasoning: bool,
    official: Official,
    qwen_tokenizer: TokenizerFile,
) -> None:
    template = official(name)
    recording = Recording(
        official=template,
        renderer=renderer_of(template, qwen_tokenizer, enable_thinking),
        enable_thinking=enable_thinking,
    )

    @FEW
    @given(tool_loops(reasoning=has_reasoning))
    def holds(conversation: Conversation) -> None:
        prompts = recording.play(conversation, lambda turn: recording.sampled(conversation, turn))
        assert prompts[-1] == template.ids(flatten(conversation), TOOLS, enable_thinking=enable_thinking)

    holds()


@pytest.mark.parametrize("name", ["chatml", "qwen3_instruct_2507"])
def test_templates_without_reasoning_are_append_only_over_user_messages_too(
    name: str, official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    template = official(name)
    recording = Recording(
        official=template, renderer=renderer_of(template, qwen_tokenizer, None), enable_thinking=None
    )

    @FEW
    @given(dialogues(reasoning=False))
    def holds(conversation: Conversation) -> None:
        prompts = recording.play(conversation, lambda turn: recording.sampled(conversation, turn))
        assert prompts[-1] == template.ids(flatten(conversation), TOOLS)

    holds()


def play_text(
    name: str,
    enable_thinking: bool | None,
    conversation: Conversation,
    replies: list[str],
    official: Official,
    tokenizer: TokenizerFile,
) -> tuple[str, str]:
    """Return (recorded, official) text of the prompt after the last turn, for replies sampled as written."""
    template = official(name)
    renderer = renderer_of(template, tokenizer, enable_thinking)
    recording = Recording(official=template, renderer=renderer, enable_thinking=enable_thinking)
    encoded = [template.tokenizer.encode(reply, add_special_tokens=False) for reply in replies]
    prompts = recording.play(conversation, lambda turn: encoded[turn])
    full = template.text(flatten(conversation), TOOLS, enable_thinking=enable_thinking)
    return renderer.decode(np.array(prompts[-1], np.int32)), full


HERMES_LS = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
XML_LS = "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


def test_qwen3_with_thinking_off_keeps_the_empty_block_that_the_official_render_drops(
    official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    turn = (assistant("", call(command="ls")), (tool("a.py"),))
    conversation = Conversation(opening=(user(),), turns=(turn, turn))

    recorded, full = play_text(
        "qwen3", False, conversation, [HERMES_LS + "<|im_end|>"] * 2, official, qwen_tokenizer
    )

    # One block a turn, each of which the policy was sampled after; the official render keeps the last.
    assert recorded.count(EMPTY_THINK) == 3
    assert full.count(EMPTY_THINK) == 1
    assert recorded.replace(EMPTY_THINK, "") == full.replace(EMPTY_THINK, "")


@pytest.mark.parametrize(("name", "reply"), [("qwen3", HERMES_LS), ("qwen3_5_think", XML_LS)])
def test_a_user_message_in_mid_episode_leaves_recorded_reasoning_that_the_official_render_drops(
    name: str, reply: str, official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    thinks = assistant("", call(command="ls"), reasoning="Hm.")
    answers = assistant("Done.", reasoning="Ha.")
    conversation = Conversation(
        opening=(user(),),
        turns=((thinks, (tool("a.py"),)), (answers, (user("No."),)), (thinks, (tool("b.py"),))),
    )
    opened = "<think>\n" if name == "qwen3" else ""  # Qwen3.5's generation prompt has opened it already
    replies = [
        f"{opened}Hm.\n</think>\n\n{reply}<|im_end|>",
        f"{opened}Ha.\n</think>\n\nDone.<|im_end|>",
        f"{opened}Hm.\n</think>\n\n{reply}<|im_end|>",
    ]

    recorded, full = play_text(name, True, conversation, replies, official, qwen_tokenizer)

    first, last = recorded.split("<|im_start|>user\nNo.")
    without_old_reasoning = re.sub(r"<think>\n.*?\n</think>\n\n", "", first)
    assert first.count("</think>") == 2
    assert without_old_reasoning + "<|im_start|>user\nNo." + last == full


@pytest.mark.parametrize(
    ("name", "reply", "written", "rendered"),
    [
        ("qwen3_instruct_2507", HERMES_LS, "Look.", "Look.\n"),
        ("qwen3_5_think", XML_LS, "Look.\n", "Look.\n\n"),
    ],
)
def test_prose_before_a_call_stays_as_sampled_where_the_official_render_adds_a_newline(
    name: str, reply: str, written: str, rendered: str, official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    conversation = Conversation(
        opening=(user(),), turns=((assistant("Look.", call(command="ls")), (tool("a.py"),)),)
    )
    enable_thinking = None if name == "qwen3_instruct_2507" else False

    recorded, full = play_text(
        name, enable_thinking, conversation, [written + reply + "<|im_end|>"], official, qwen_tokenizer
    )

    assert written + reply in recorded
    assert recorded.replace(written + reply, rendered + reply) == full


def test_a_reply_that_begins_with_a_newline_stays_two_tokens_where_a_render_would_merge_them(
    official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    template = official("qwen3_5_think")
    newline, two_newlines, end_id = 198, 271, 151645
    sampled = [newline, *template.tokenizer.encode("So.", add_special_tokens=False), end_id]
    conversation = Conversation(opening=(user(),), turns=((assistant("So."), (user("And?"),)),))
    renderer = renderer_of(template, qwen_tokenizer, True)
    recording = Recording(official=template, renderer=renderer, enable_thinking=True)

    first, second = recording.play(conversation, lambda turn: sampled)

    # The generation prompt ends in "<think>\n"; as text, that newline and the sampled one are one token.
    assert second[: len(first) + len(sampled)] == [*first, *sampled]
    assert second[len(first) - 1 : len(first) + 1] == [newline, newline]
    prompt_text = template.text([user()], TOOLS)
    encoded_again = template.tokenizer.encode(prompt_text + "\nSo.", add_special_tokens=False)
    assert encoded_again[len(first) - 1] == two_newlines


def test_a_tool_turn_keeps_the_newline_after_the_end_marker_and_its_header(
    official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    renderer = renderer_of(official("qwen3_5_think"), qwen_tokenizer, False)
    end_id = 151645

    suffix = renderer.render_suffix(end_id, [tool("a.py")], TOOLS)

    assert suffix[0] == 198  # the newline that belongs to the turn before
    assert renderer.decode(suffix) == (
        "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{EMPTY_THINK}"
    )


def test_reasoning_left_inside_the_content_is_split_as_the_official_template_splits_it(
    official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    messages = [system(), user(), assistant("<think>\nHm.\n</think>\n\nLook.", call(command="ls")), tool("a")]
    for name, enable_thinking in MODES[1:]:
        template = official(name)
        text = template.text(messages, TOOLS, enable_thinking=enable_thinking)
        renderer = renderer_of(template, qwen_tokenizer, enable_thinking)
        assert renderer.decode(renderer.render_prompt(messages, TOOLS)) == text, name


def test_a_history_that_the_official_template_refuses_is_rendered_in_place(
    official: Official, qwen_tokenizer: TokenizerFile
) -> None:
    template = official("qwen3_5_think")
    renderer = renderer_of(template, qwen_tokenizer, False)
    late_system = [user("a"), system("b")]
    no_query = [system("a"), assistant("b")]
    for messages, reason in ((late_system, "must be at the beginning"), (no_query, "No user query")):
        with pytest.raises(Exception, match=reason):
            template.text(messages)

    text = renderer.decode(renderer.render_prompt(late_system, ()))
    assert text.startswith(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant"
    )
    text = renderer.decode(renderer.render_prompt(no_query, ()))
    assert text.startswith("<|im_start|>system\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n")


def test_an_empty_list_of_tools_shows_no_tools(official: Official, qwen_tokenizer: TokenizerFile) -> None:
    for name, enable_thinking in MODES:
        renderer = renderer_of(official(name), qwen_tokenizer, enable_thinking)
        text = renderer.decode(renderer.render_prompt([user("hi")], []))
        assert text.startswith("<|im_start|>user\nhi<|im_end|>\n"), name
