"""A directory's own chat template: found, compiled and rendered as the transformers library does.

Used to check our renderer and to choose its dialect; no prompt that is sampled comes from here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotage.errors import TemplateError
from pilotage.rendering.foreign import failing_as_template_error
from pilotage.rendering.template_objects import message_object, tool_object
from pilotage.types import Message, ToolSchema

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        """Args:
            variables: further names that the template may read, such as `bos_token`.

        Raises:
            TemplateError: the source is no valid template.
        """
        self.source = source
        self._variables = dict(variables or {})
        with failing_as_template_error("the chat template does not compile"):
            self._template = _environment().from_string(source, globals=_GLOBALS)

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`.

        Raises:
            TemplateError: neither is there, or the template does not compile.
        """
        config = _read_config(model_dir / CONFIG_FILE)
        path = model_dir / TEMPLATE_FILE
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named ones
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str) or not source:
            raise TemplateError(
                f"{model_dir} has no chat template; put one in {TEMPLATE_FILE}, or under chat_template in"
                f" {CONFIG_FILE}"
            )
        try:
            return cls(source, variables=dict(_special_tokens(config)))
        except TemplateError as error:
            raise TemplateError(f"{model_dir}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            enable_thinking: passed on; None leaves it undefined, which is the template's own default.

        Raises:
            TemplateError: the template refuses the conversation, or fails.
        """
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        with failing_as_template_error("the chat template failed"):
            return self._template.render(
                messages=[message_object(message) for message in messages],
                tools=[tool_object(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
                **thinking,
            )


class _GenerationTag(Extension):
    """`{% generation %}`, which marks assistant text for training; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now(UTC).astimezone().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with failing_as_template_error(f"{path} is not JSON"):
        config = json.loads(path.read_bytes())
    return config if isinstance(config, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the special tokens; transformers hands them to the template."""
    named = [(name, value) for name, value in config.items() if name.endswith("_token")]
    texts = [(name, value["content"] if isinstance(value, dict) else value) for name, value in named]
    return [(name, text) for name, text in texts if isinstance(text, str)]
