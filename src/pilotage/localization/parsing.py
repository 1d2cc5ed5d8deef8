"""Parse sources that nobody here wrote."""

import ast
import warnings


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree, or None where the source does not parse; a byte order mark is dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of escapes and comparisons that are not ours to mend
        try:
            return ast.parse(source.removeprefix("\ufeff"))
        except (SyntaxError, ValueError, RecursionError):
            return None
