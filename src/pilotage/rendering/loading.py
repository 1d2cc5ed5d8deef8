"""From a model directory to its renderer; what is handed out was compared with the directory's template."""

from pathlib import Path

from pilotage.errors import TemplateError
from pilotage.rendering.chat_template import ChatTemplate
from pilotage.rendering.families import choose_dialect
from pilotage.rendering.renderer import TemplateRenderer
from pilotage.rendering.tokenizer import TokenizerFile
from pilotage.rendering.verify import find_disagreement


def load_renderer(model_dir: Path, *, enable_thinking: bool | None = None) -> TemplateRenderer:
    """Return the renderer of a model directory's chat template.

    Args:
        enable_thinking: whether the policy may think; None is the template's own default.

    Raises:
        TemplateError: no tokenizer, no template, a template of no supported family, one that writes other
            tokens than the family's renderer, or one without the thinking that was asked for.
    """
    tokenizer = TokenizerFile.load(model_dir)
    template = ChatTemplate.load(model_dir)
    try:
        dialect = choose_dialect(template, enable_thinking=enable_thinking)
        renderer = TemplateRenderer(tokenizer=tokenizer, dialect=dialect)
        found = find_disagreement(renderer, tokenizer, template, enable_thinking=enable_thinking)
    except TemplateError as error:
        raise TemplateError(f"{model_dir}: {error}") from error
    if found is not None:
        raise TemplateError(
            f"{model_dir}: the chat template is not the official one of {dialect.name}: at token"
            f" {found.token_index} it writes {found.expected!r}, the renderer {found.got!r}; see"
            " `pilotage verify-template`"
        )
    return renderer
