"""Choosing the dialect that writes what a chat template writes, by looking at the template."""

from pilotage.errors import TemplateError
from pilotage.rendering.chat_template import ChatTemplate
from pilotage.rendering.chatml import CHATML_TEMPLATE, ChatML
from pilotage.rendering.dialect import Dialect, ThinkBlock
from pilotage.rendering.qwen import Qwen3, Qwen35
from pilotage.types import Message, Role, ToolCall

_HEADER = "<|im_start|>assistant\n"
_QUERY = Message(role=Role.USER, content="x")
_FLAG_CALL = Message(
    role=Role.ASSISTANT, tool_calls=(ToolCall(id="0", name="f", arguments='{"is_set": true}'),)
)


def choose_dialect(template: ChatTemplate, *, enable_thinking: bool | None) -> Dialect:
    """Return the dialect that writes what `template` writes.

    The think block is read from a rendered generation prompt, not from the name of a model.

    Raises:
        TemplateError: no dialect writes this template, or it knows no thinking and thinking was asked for.
    """
    source = template.source
    if source.strip() == CHATML_TEMPLATE.strip():
        _refuse_thinking(enable_thinking)
        return ChatML()
    if "<tool_call>" not in source or "<tool_response>" not in source:
        raise TemplateError(
            "the chat template belongs to no supported family (ChatML of this project, Qwen3, Qwen3.5);"
            " add a dialect to pilotage.rendering, or use a model of these families"
        )
    think_block = _think_block(template, enable_thinking)
    knows_reasoning = "reasoning_content" in source
    if not knows_reasoning:
        _refuse_thinking(enable_thinking)
    if "<function=" in source:
        return Qwen35(think_block=think_block, writes_json_scalars=_writes_json_scalars(template))
    return Qwen3(think_block=think_block, splits_reasoning=knows_reasoning)


def _think_block(template: ChatTemplate, enable_thinking: bool | None) -> ThinkBlock:
    bare = template.render([_QUERY], add_generation_prompt=False)
    prompted = template.render([_QUERY], add_generation_prompt=True, enable_thinking=enable_thinking)
    added = prompted.removeprefix(bare)
    try:
        return ThinkBlock(added.removeprefix(_HEADER))
    except ValueError as error:
        raise TemplateError(
            f"the chat template's generation prompt {added!r} is of no supported family"
        ) from error


def _writes_json_scalars(template: ChatTemplate) -> bool:
    return "\ntrue\n" in template.render([_QUERY, _FLAG_CALL], add_generation_prompt=False)


def _refuse_thinking(enable_thinking: bool | None) -> None:
    if enable_thinking:
        raise TemplateError("thinking was asked for, but the chat template knows none; leave it off")
