"""The HTTP APIs that agents may speak, one file each; to add one, write its file and name it here."""

from pilotage.proxy.dialect import Dialect
from pilotage.proxy.dialects.anthropic_messages import AnthropicMessages
from pilotage.proxy.dialects.chat_completions import ChatCompletions
from pilotage.proxy.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), AnthropicMessages(), OpenAIResponses())

__all__ = ["DIALECTS"]
