"""Messages <-> tokens, for one chat template at a time.

Invariant: a turn's prompt is the recorded ids and the encoding of the new messages only. Nothing sampled
is ever decoded and encoded again, and only a template's own markers become control tokens.

It does not sample, keep conversations, or repair what a policy wrote.
"""

from pilotage.rendering.chat_template import ChatTemplate
from pilotage.rendering.chatml import CHATML_TEMPLATE, ChatML
from pilotage.rendering.dialect import MALFORMED_NAME, Dialect, ThinkBlock
from pilotage.rendering.loading import load_renderer
from pilotage.rendering.qwen import Qwen3, Qwen35
from pilotage.rendering.renderer import TemplateRenderer
from pilotage.rendering.tokenizer import DecodedPiece, Markup, Segment, TokenizerFile
from pilotage.rendering.verify import TemplateReport, format_report, verify_template

__all__ = [
    "CHATML_TEMPLATE",
    "MALFORMED_NAME",
    "ChatML",
    "ChatTemplate",
    "DecodedPiece",
    "Dialect",
    "Markup",
    "Qwen3",
    "Qwen35",
    "Segment",
    "TemplateRenderer",
    "TemplateReport",
    "ThinkBlock",
    "TokenizerFile",
    "format_report",
    "load_renderer",
    "verify_template",
]
