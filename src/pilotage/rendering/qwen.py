"""The dialects of Qwen3 (JSON calls) and Qwen3.5 (XML calls), as their official templates write them.

Both show an assistant's reasoning only after the last user query, show a run of tool messages as one user
turn, and may end the generation prompt with a think block. A whole conversation is rendered as the
official template renders it; a suffix only holds what is new, so nothing recorded changes when the
official template would now drop its reasoning.

Where an official template raises (Qwen3.5: a system message that is not the first, no user query at all),
these render the message in place instead: an agent's odd history must not end its rollout.

Source: the chat templates published with the models, compared in the tests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pilotage.rendering import hermes, xml_calls
from pilotage.rendering.dialect import CallText, ThinkBlock, dump_json
from pilotage.rendering.template_objects import tool_object
from pilotage.rendering.tokenizer import Markup, Segment
from pilotage.types import Message, Role, ToolCall, ToolSchema

_QWEN3_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_QWEN3_TOOLS_TAIL = Markup(
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within"
    " <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
_QWEN35_TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_QWEN35_TOOLS_TAIL = Markup(
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
    "multiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be"
    " nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function"
    " call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge"
    " and do not tell the user about function calls\n</IMPORTANT>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3:
    """Qwen3: calls in JSON. The 2507 instruct models are the variant that knows no reasoning."""

    think_block: ThinkBlock = ThinkBlock.ABSENT
    splits_reasoning: bool = True
    name = "Qwen3"

    def head(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Segment]:
        """Return the system text, then the tools as JSON and how to call them."""
        if not tools:
            return [] if system is None else [*_turn(Role.SYSTEM, system)]
        opening = "" if system is None else f"{system}\n\n"
        text = opening + _QWEN3_TOOLS_HEAD + _tool_lines(tools)
        return [Markup("<|im_start|>system\n"), text, _QWEN3_TOOLS_TAIL]

    def turns(self, messages: Sequence[Message], *, is_suffix: bool) -> Iterable[Segment]:
        """Yield the turns; reasoning is shown after the last user query only."""
        last_query = _last_query(messages, is_suffix=is_suffix)
        for index, message in enumerate(messages):
            if message.role is Role.ASSISTANT:
                is_last = index == len(messages) - 1
                yield from self._assistant(message, is_after=index > last_query, is_last=is_last)
            elif message.role is Role.TOOL:
                yield from _tool_result(messages, index)
            else:
                yield from _turn(message.role, message.content)

    def read_call(self, text: str, tools: Sequence[ToolSchema]) -> CallText:
        """Read a JSON call."""
        return hermes.read_call(text)

    def _assistant(self, message: Message, *, is_after: bool, is_last: bool) -> Iterable[Segment]:
        reasoning, content = _split_reasoning(message) if self.splits_reasoning else ("", message.content)
        yield Markup("<|im_start|>assistant\n")
        if self.splits_reasoning and is_after and (is_last or reasoning):
            yield from (Markup("<think>\n"), reasoning.strip("\n"), Markup("\n</think>\n\n"))
            yield content.lstrip("\n")
        else:
            yield content
        yield from _calls(message.tool_calls, hermes.write_call, separator="\n" if content else "")
        yield Markup("<|im_end|>\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35:
    """Qwen3.5 and 3.6: calls in XML; all text is trimmed."""

    think_block: ThinkBlock = ThinkBlock.OPEN
    writes_json_scalars: bool = False
    """Qwen3.6 writes `true` where Qwen3.5 writes `True`."""
    splits_reasoning = True
    name = "Qwen3.5"

    def head(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Segment]:
        """Return the tools as JSON and how to call them, then the system text."""
        content = None if system is None else system.strip()
        if not tools:
            return [] if content is None else [*_turn(Role.SYSTEM, content)]
        closing = f"\n\n{content}" if content else ""
        text = _QWEN35_TOOLS_HEAD + _tool_lines(tools)
        return [Markup("<|im_start|>system\n"), text, _QWEN35_TOOLS_TAIL, closing, Markup("<|im_end|>\n")]

    def turns(self, messages: Sequence[Message], *, is_suffix: bool) -> Iterable[Segment]:
        """Yield the turns; every assistant turn after the last user query has a think block."""
        messages = [replace(message, content=message.content.strip()) for message in messages]
        last_query = _last_query(messages, is_suffix=is_suffix)
        for index, message in enumerate(messages):
            if message.role is Role.ASSISTANT:
                yield from self._assistant(message, is_after=index > last_query)
            elif message.role is Role.TOOL:
                yield from _tool_result(messages, index)
            else:
                yield from _turn(message.role, message.content)

    def read_call(self, text: str, tools: Sequence[ToolSchema]) -> CallText:
        """Read an XML call, typed by the schemas of `tools`."""
        return xml_calls.read_call(text, tools)

    def _assistant(self, message: Message, *, is_after: bool) -> Iterable[Segment]:
        reasoning, content = _split_reasoning(message)
        yield Markup("<|im_start|>assistant\n")
        if is_after:
            yield from (Markup("<think>\n"), reasoning.strip(), Markup("\n</think>\n\n"))
        yield content
        yield from _calls(message.tool_calls, self._write_call, separator="\n\n" if content else "")
        yield Markup("<|im_end|>\n")

    def _write_call(self, call: ToolCall) -> str:
        return xml_calls.write_call(call, writes_json_scalars=self.writes_json_scalars)


def _turn(role: Role, content: str) -> Iterable[Segment]:
    return (Markup(f"<|im_start|>{role}\n"), content, Markup("<|im_end|>\n"))


def _tool_lines(tools: Sequence[ToolSchema]) -> str:
    return "".join("\n" + dump_json(tool_object(tool)) for tool in tools)


def _tool_result(messages: Sequence[Message], index: int) -> Iterable[Segment]:
    """Yield one result; the first of a run opens the user turn, the last closes it."""
    if index == 0 or messages[index - 1].role is not Role.TOOL:
        yield Markup("<|im_start|>user")
    yield from (Markup("\n<tool_response>\n"), messages[index].content, Markup("\n</tool_response>"))
    if index == len(messages) - 1 or messages[index + 1].role is not Role.TOOL:
        yield Markup("<|im_end|>\n")


def _calls(
    calls: Sequence[ToolCall], write: Callable[[ToolCall], str], *, separator: str
) -> Iterable[Segment]:
    for index, call in enumerate(calls):
        yield "\n" if index else separator
        yield from (Markup("<tool_call>\n"), write(call), Markup("\n</tool_call>"))


def _split_reasoning(message: Message) -> tuple[str, str]:
    """Return (reasoning, content); an agent may have left the reasoning inside the content."""
    if message.reasoning or "</think>" not in message.content:
        return message.reasoning, message.content
    before, *_, content = message.content.split("</think>")
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), content.lstrip("\n")


def _last_query(messages: Sequence[Message], *, is_suffix: bool) -> int:
    """Return the index of the last user message that is no tool result in disguise."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role is Role.USER:
            content = messages[index].content
            if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
                return index
    return -1 if is_suffix else len(messages) - 1
