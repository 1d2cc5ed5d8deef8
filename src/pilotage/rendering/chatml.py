"""The dialect of our own tiny policy: plain ChatML with one short line for each tool.

A policy of half a million parameters pays for every token of its context, so a tool is shown by its name
and the names of its parameters. The template is append-only: what was rendered once is never rendered
otherwise later, whatever follows.

    <|im_start|>system
    Find the bug.
    tool terminal(command)<|im_end|>
    <|im_start|>user
    It crashes.<|im_end|>
    <|im_start|>assistant
    <tool_call>{"name": "terminal", "arguments": {"command": "ls"}}</tool_call><|im_end|>
    <|im_start|>tool
    setup.py<|im_end|>
    <|im_start|>assistant
"""

from collections.abc import Iterable, Sequence

from pilotage.rendering import hermes
from pilotage.rendering.dialect import CallText, ThinkBlock
from pilotage.rendering.tokenizer import Markup, Segment
from pilotage.types import Message, ToolSchema

_HIDDEN_PARAMETERS = ("security_risk", "summary")
"""OpenHands adds these to every tool; a tiny policy does not fill them in."""

CHATML_TEMPLATE = r"""
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system' -}}
    {%- if has_system and messages[0].content -%}
        {{- '\n' + messages[0].content -}}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {%- set function = tool.function -%}
        {%- set names = namespace(text='') -%}
        {%- for name in function.parameters.properties or {} if name not in ('security_risk', 'summary') -%}
            {%- set names.text = names.text + (', ' if names.text else '') + name -%}
        {%- endfor -%}
        {{- '\ntool ' + function.name + '(' + names.text + ')' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (loop.first and has_system) -%}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function -%}
            {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""The same format as a Hugging Face chat template; saved with the policy."""


class ChatML:
    """Renders and reads the format of `CHATML_TEMPLATE`; reasoning has no place in it."""

    name = "ChatML"
    think_block = ThinkBlock.ABSENT
    splits_reasoning = False

    def head(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Segment]:
        """Return the system text and a line for each tool."""
        if system is None and not tools:
            return []
        lines = [system] if system else []
        lines += [f"tool {tool.name}({', '.join(_parameter_names(tool))})" for tool in tools]
        text = "".join("\n" + line for line in lines)
        return [Markup("<|im_start|>system"), text, Markup("<|im_end|>\n")]

    def turns(self, messages: Sequence[Message], *, is_suffix: bool) -> Iterable[Segment]:
        """Yield each message on its own; no turn depends on another."""
        for message in messages:
            yield Markup(f"<|im_start|>{message.role}\n")
            yield message.content
            for call in message.tool_calls:
                yield Markup("<tool_call>")
                yield hermes.write_call(call)
                yield Markup("</tool_call>")
            yield Markup("<|im_end|>\n")

    def read_call(self, text: str, tools: Sequence[ToolSchema]) -> CallText:
        """Read a JSON call."""
        return hermes.read_call(text)


def _parameter_names(tool: ToolSchema) -> list[str]:
    return [name for name in tool.parameters.get("properties") or {} if name not in _HIDDEN_PARAMETERS]
