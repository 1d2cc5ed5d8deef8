"""From a model directory to its renderer, and the report on its template."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.rendering.conftest import byte_tokenizer
from tests.rendering.conversations import TOOLS, system, tool, user

from pilotage.errors import ConfigError, TemplateError
from pilotage.rendering import (
    CHATML_TEMPLATE,
    ChatTemplate,
    Markup,
    TokenizerFile,
    format_report,
    load_renderer,
    verify_template,
)

MakeModelDir = Callable[[str], Path]


def test_our_own_template_is_append_only_and_agrees_with_its_renderer(tiny_model_dir: Path) -> None:
    report = verify_template(tiny_model_dir)
    assert report.is_append_only
    assert report.is_usable
    [mode] = report.modes
    assert mode.family == "ChatML"
    assert len(mode.scenarios) == 7


def test_a_renderer_is_loaded_from_a_directory(tiny_model_dir: Path) -> None:
    renderer = load_renderer(tiny_model_dir)
    prompt = renderer.render_prompt([user("hi")], ())
    assert renderer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "enable_thinking", "generation_prompt"),
    [
        ("qwen3", None, ""),
        ("qwen3", False, "<think>\n\n</think>\n\n"),
        ("qwen3_instruct_2507", None, ""),
        ("qwen3_instruct_2507", False, ""),
        ("qwen3_5_think", None, "<think>\n"),
        ("qwen3_5_think", False, "<think>\n\n</think>\n\n"),
        ("qwen3_5_nothink", None, "<think>\n\n</think>\n\n"),
        ("qwen3_5_nothink", True, "<think>\n"),
    ],
)
def test_the_think_block_is_read_from_the_template(
    name: str, enable_thinking: bool | None, generation_prompt: str, model_dir: MakeModelDir
) -> None:
    renderer = load_renderer(model_dir(name), enable_thinking=enable_thinking)
    text = renderer.decode(renderer.render_prompt([user()], ()))
    assert text.endswith("<|im_start|>assistant\n" + generation_prompt)


def test_thinking_asked_of_a_template_that_knows_none_is_refused(
    tiny_model_dir: Path, model_dir: MakeModelDir
) -> None:
    for directory in (tiny_model_dir, model_dir("qwen3_instruct_2507")):
        with pytest.raises(TemplateError, match="thinking was asked for"):
            load_renderer(directory, enable_thinking=True)


def test_the_official_templates_are_usable_and_say_where_they_rewrite_history(
    model_dir: MakeModelDir,
) -> None:
    instruct = verify_template(model_dir("qwen3_instruct_2507"))
    assert (instruct.is_append_only, instruct.is_usable) == (True, True)

    report = verify_template(model_dir("qwen3_5_think"))

    assert (report.is_append_only, report.is_usable) == (False, True)
    off, on = report.modes
    rewritten = {scenario.name: scenario.rewritten for scenario in off.scenarios}
    assert rewritten["one call a turn"] is None
    assert rewritten["parallel calls"] is None
    found = rewritten["user messages"]
    assert found is not None
    assert found.turn == 2
    # Two tokens before the place and eight from it on; a token is a byte or a marker.
    assert found.expected == "t\n<think>\n\n</think>\n\nAn"
    assert found.got == "t\nAnswer 0"
    thinking = {scenario.name: scenario.rewritten for scenario in on.scenarios}
    assert thinking["reasoning before a call"] is None
    dropped = thinking["a user message after calls"]
    assert dropped is not None
    assert dropped.turn == 5  # the first prompt that holds the user message of turn 4
    text = format_report(report)
    assert "Qwen3.5, thinking off" in text
    assert "rewritten at turn 2, token" in text
    assert text.endswith("append-only: no\nusable: yes; recorded tokens are extended, never rendered again")


def make_dir(directory: Path, template: str | None) -> Path:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


COUNTING = (
    "{% for message in messages %}{{ loop.revindex }} {{ message.role }}: {{ message.content }}|{% endfor %}"
)


def test_the_first_divergence_of_a_template_that_rewrites_everything_is_shown(tmp_path: Path) -> None:
    report = verify_template(make_dir(tmp_path, COUNTING))
    assert (report.is_append_only, report.is_usable) == (False, False)
    first = report.modes[0].scenarios[0]
    assert first.rewritten is not None
    # The first prompt begins "2 system: ..."; with the reply it begins "3 system: ...".
    assert (first.rewritten.turn, first.rewritten.token_index) == (1, 0)
    assert (first.rewritten.expected, first.rewritten.got) == ("2 system", "3 system")
    assert "no renderer: the chat template belongs to no supported family" in format_report(report)


def test_a_template_that_refuses_a_conversation_is_reported_not_raised(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}{%- if message.role == 'tool' %}{{ raise_exception('no tools') }}"
    )
    report = verify_template(make_dir(tmp_path, template + "{%- endif %}{{ message.content }}{%- endfor %}"))
    refused = [scenario.name for scenario in report.modes[0].scenarios if "no tools" in scenario.refusal]
    assert "one call a turn" in refused
    assert "user messages" not in refused
    assert "refused: the chat template failed: TemplateError: no tools" in format_report(report)


def test_a_changed_official_template_is_refused_with_the_place(
    model_dir: MakeModelDir, tmp_path: Path
) -> None:
    directory = model_dir("qwen3_instruct_2507")
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text().replace("# Tools", "# Functions"))
    with pytest.raises(TemplateError, match=r"not the official one of Qwen3.*# F.*# T"):
        load_renderer(directory)
    assert not verify_template(directory).is_usable


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("", "has no chat template"),
        ("{% if %}", "does not compile"),
        (COUNTING, "belongs to no supported family"),
        ("{{ messages.nothing.content }} <tool_call> <tool_response>", "the chat template failed"),
        (
            "{{ add_generation_prompt }}<tool_call><tool_response>",
            "prompt 'True.*' is of no supported family",
        ),
    ],
)
def test_a_directory_without_a_usable_template_gives_one_clear_line(
    template: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_renderer(make_dir(tmp_path, template))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_tokenizer_gives_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    for read in (load_renderer, verify_template):
        with pytest.raises(TemplateError, match=r"has no tokenizer\.json; give a model directory"):
            read(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {}, "added_tokens": []}', '{"model": 1}']
)
def test_a_broken_tokenizer_file_gives_one_clear_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TemplateError, match=r"tokenizer\.json is not a readable tokenizer"):
        TokenizerFile.load(tmp_path)


def test_a_tokenizer_without_the_markers_of_its_template_is_refused(
    tiny_model_dir: Path, model_dir: MakeModelDir
) -> None:
    directory = model_dir("qwen3")
    shutil.copy(tiny_model_dir / "tokenizer.json", directory)
    with pytest.raises(TemplateError, match="no token '<think>', which the chat template writes"):
        load_renderer(directory)


def test_a_template_is_found_in_the_tokenizer_config_alone_or_by_name(tmp_path: Path) -> None:
    make_dir(tmp_path, None)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML_TEMPLATE}]
    for stored in (CHATML_TEMPLATE, named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        assert load_renderer(tmp_path).stop_token_ids == (257, 260)


def test_a_template_may_use_what_transformers_offers() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}|{% endfor %}"
        "{{ {'é': [1]} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, variables={"bos_token": "<s>"})
    text = template.render([system("a"), tool("b")], TOOLS, add_generation_prompt=False)
    assert text == '<s>ab|{"é": [1]}4'


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError, match="SecurityError"):
        template.render([user()], add_generation_prompt=True)


def test_no_official_marker_is_missed_in_markup(qwen_tokenizer: TokenizerFile) -> None:
    ids = qwen_tokenizer.encode([Markup("<|im_start|><|im_end|><tool_call></tool_call><think></think>")])
    assert ids.tolist() == [151644, 151645, 151657, 151658, 151667, 151668]
