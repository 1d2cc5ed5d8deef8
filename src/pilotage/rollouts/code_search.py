"""Search Python definitions inside a sandbox with POSIX tools alone: find, grep, awk.

One awk pass over all files tracks `class` and `def` by indentation, attributes every line that holds a
query word as a whole identifier to its definition, and counts. It reads code as lines, not as syntax: a
triple-quoted string never opens or closes a definition, decorators belong to what surrounds them.
"""

import re
import shlex
from pathlib import Path

MAX_WORDS = 16
MAX_RESULTS = 3
NO_MATCH = "no match"

_PROGRAM = Path(__file__).with_suffix(".awk").read_text()


def search_command(query: str) -> str | None:
    """Return the shell command that searches the working directory; None where the query has no word.

    Words are runs of [A-Za-z0-9_]; everything else separates, so nothing of the query reaches the shell.
    """
    words = list(dict.fromkeys(re.findall(r"[A-Za-z0-9_]+", query)))[:MAX_WORDS]
    if not words:
        return None
    any_word = "|".join(words)
    awk = (
        f"awk -v query={shlex.quote(' '.join(words))} -v pattern={shlex.quote(any_word)}"
        f" -v most={MAX_RESULTS} {shlex.quote(_PROGRAM)}"
    )
    # Most files hold none of the words; grep finds those that do at a tenth of awk's cost.
    files = f"find . -type f -name '*.py' -exec grep -lwE '{any_word}' {{}} +"
    return f"export LC_ALL=C; {files} | {awk}"


def search_result(output: str) -> str:
    """Turn the command's output into what the agent reads, best first: one location a line.

    `path::Class::method`, `path::function`, `path::Class::` for the class itself, `path` for the rest; the
    short form that `localization_finish` takes.
    """
    found: list[str] = []
    for row in output.splitlines():
        _, _, _, path, class_name, function = row.split("\t")
        names = [name for name in (class_name, function) if name != "-"]
        found.append("::".join([path, *names]) + ("::" if names and function == "-" else ""))
    return "\n".join(found) or NO_MATCH
