"""Shell text as simple commands: enough of the grammar to tell a program from its arguments.

Total: every text gives commands, and what is no shell gives none that mean anything. Quotes, escapes,
comments, lists, pipelines, redirections, here-documents, subshells and command substitution are followed;
variables are not expanded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
      (?P<blank>[ \t\r]+|\\\n)
    | (?P<comment>\#[^\n]*)
    | (?P<redirect>\d*(?:&>>|&>|>>|>\||>&|<<<|<<|<>|<|>))
    | (?P<operator>\|\||&&|;;|\|&|[;&|()\n])
    | (?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|()<>'"\\]|['"\\])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^'"\\]+|.)""", re.DOTALL)
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\2")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_BODY_MARK = "\x01"


@dataclass(slots=True)
class Command:
    """One simple command."""

    words: list[str] = field(default_factory=list[str])
    """The program and its arguments, without quotes; assignments before it are words too."""
    written: list[str] = field(default_factory=list[str])
    """Where its output is redirected."""
    appended: list[str] = field(default_factory=list[str])
    read: list[str] = field(default_factory=list[str])
    """Where its input comes from."""
    body: str = ""
    """Its here-document or here-string."""


def commands_of(text: str) -> Iterator[Command]:
    """Yield the simple commands of a script in the order of the text, substituted ones after their host."""
    text, bodies = _without_bodies(text)
    command = Command()
    redirect = ""
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "redirect":
            redirect = match[0].lstrip("0123456789")
        elif match.lastgroup == "word":
            _add_word(command, match[0], redirect, bodies)
            redirect = ""
            for inner in _substituted(match[0]):
                yield from commands_of(inner)
        elif match.lastgroup == "operator":
            yield command
            command, redirect = Command(), ""
    yield command


def _without_bodies(text: str) -> tuple[str, list[str]]:
    """Take here-documents out; in their place stands a word that names the body."""
    if "<<" not in text:
        return text, []
    kept: list[str] = []
    bodies: list[str] = []
    lines = iter(text.split("\n"))
    for line in lines:
        found = list(_HEREDOC.finditer(line))
        for match in found:
            body: list[str] = []
            for inner in lines:
                if (inner.lstrip("\t") if match[1] else inner).rstrip() == match[3]:
                    break
                body.append(inner)
            bodies.append("\n".join(body))
        first = len(bodies) - len(found)
        names = (f"<< {_BODY_MARK}{first + index} " for index in range(len(found)))
        kept.append(_HEREDOC.sub(lambda _, names=names: next(names), line))
    return "\n".join(kept), bodies


def _add_word(command: Command, raw: str, redirect: str, bodies: list[str]) -> None:
    word = _unquoted(raw)
    if not redirect:
        command.words.append(word)
    elif redirect == "<<" and word.startswith(_BODY_MARK) and word[1:].isdecimal():
        command.body = bodies[int(word[1:])] if int(word[1:]) < len(bodies) else ""
    elif redirect == "<<<":
        command.body = word
    elif redirect in ("<", "<>"):
        command.read.append(word)
    elif not word.isdecimal() and word != "-":  # 2>&1 names a descriptor
        (command.appended if redirect.endswith(">>") else command.written).append(word)


def _unquoted(raw: str) -> str:
    parts: list[str] = []
    for single, double, escaped, plain in _PART.findall(raw):
        parts.append(single + re.sub(r'\\([$`"\\])', r"\1", double) + escaped + plain)
    return "".join(parts)


def _substituted(raw: str) -> Iterator[str]:
    """Yield the scripts of substitutions inside double quotes; unquoted ones are split by their brackets."""
    if "'" in raw:
        raw = re.sub(r"'[^']*'", "", raw) if '"' not in raw else raw
    if '"' in raw or "`" in raw:
        for in_brackets, in_ticks in _SUBSTITUTION.findall(raw):
            yield in_brackets or in_ticks
