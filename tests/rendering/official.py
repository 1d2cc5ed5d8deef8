"""The reference that renderers are compared with: chat templates as the transformers library applies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from pilotage.rendering.template_objects import message_object, tool_object
from pilotage.types import Message, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialTemplate:
    """One chat template and the tokenizer that its text is encoded with."""

    source: str
    tokenizer: Any

    @staticmethod
    def encoder_of(model_dir: Path) -> Any:
        return PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        rendered = self.tokenizer.apply_chat_template(
            [message_object(message) for message in messages],
            tools=[tool_object(tool) for tool in tools] or None,
            chat_template=self.source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **thinking,
        )
        assert isinstance(rendered, str)
        return rendered

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        text = self.text(
            messages,
            tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)
