"""Which identifiers an issue mentions as code: what a person would type into a search.

Code is what stands in a fenced block, between backticks, or in a traceback. String literals, comments and the
files of a traceback's frames are left out, and so are names that a search finds everywhere: keywords,
builtins, `self`, and those of one or two letters.
"""

import builtins
import keyword
import re

COMMON_NAMES = frozenset(
    [*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls", "args", "kwargs"]
)
"""Names that say nothing about a place."""
MIN_NAME = 3
"""Letters."""

_HEAD = r"Traceback \(most recent call last\):"
_CODE = re.compile(
    rf"^(`{{3,}}|~{{3,}})[^\n]*\n(?P<block>.*?)^\1[ \t]*$"  # a fence, with what its first line says after it
    rf"|^[ \t]*{_HEAD}\n(?P<traceback>(?:[ \t]+[^\n]*\n)*[^\n]*)"  # its frames, and the line of the error
    r"|(?P<ticks>`+)(?P<span>[^`]+)(?P=ticks)",
    re.MULTILINE | re.DOTALL,
)
# A frame's file and line number, though not its function; a string on one line; a comment.
_NOT_NAMES = re.compile(
    rf"""{_HEAD}|^[ \t]*File "[^"\n]*", line \d+(?:, in )?"""
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*""",
    re.MULTILINE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def mentioned_names(text: str) -> list[str]:
    """Return the identifiers that a text mentions as code, in order, each once.

    Example: `x = parse("a b")  # fails here` between backticks mentions `parse` alone.
    """
    names: dict[str, None] = {}
    for match in _CODE.finditer(text):
        code = match["block"] or match["traceback"] or match["span"] or ""
        for name in _NAME.findall(_NOT_NAMES.sub(" ", code)):
            if len(name) >= MIN_NAME and name not in COMMON_NAMES:
                names[name] = None
    return list(names)
