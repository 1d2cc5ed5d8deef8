"""The one border to code that is not ours: tokenizer files and chat templates fail in ways of their own."""

from collections.abc import Generator
from contextlib import contextmanager

from pilotage.errors import TemplateError


@contextmanager
def failing_as_template_error(what: str) -> Generator[None]:
    """Turn any failure inside into a TemplateError of one line that begins with `what`.

    The tokenizers library raises bare `Exception`, and a template may raise whatever its expressions do.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TemplateError(f"{what}: {type(error).__name__}: {reason}") from error
