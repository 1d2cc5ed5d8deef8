"""The unsandboxed mode: a private directory stands in for the root, commands are plain processes.

For machines where no sandbox can be made, and only on an explicit request: a command can read and write
whatever this user can. Paths under the roots that Harbor fixes (/logs, /tests, ...) are rewritten in
commands and in the text of uploaded scripts; a path that a program builds at run time is not. Every process
inherits a marker, by which `stop` and the sweep find it wherever it went.
"""

import asyncio
import re
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotage.rollouts.processes import MARKER, kill_marked
from pilotage.rollouts.register import Holding, Register, current_process, remove_tree

_SCRIPT_SUFFIXES = frozenset({".sh", ".bash", ".py"})
_SYSTEM_TOPS = frozenset({"tmp", "root", "run", "var", "opt"})
"""Exist on the machine too, with programs in them: paths there keep their meaning."""


class PlainDirectory:
    """One private tree; used once: start, any number of commands, stop."""

    def __init__(self, *, register: Register, directories: Sequence[str]) -> None:
        self._register = register
        self._id = f"plain-{uuid.uuid4().hex}"
        self._directories = directories
        self._tree = register.directory / "trees" / self._id
        tops = {Path(directory).parts[1] for directory in directories} - _SYSTEM_TOPS
        # Where a path starts with one: not in the middle of a path, not where a longer name goes on.
        self._fixed = re.compile(rf"(?<![\w./-])/(?=(?:{'|'.join(map(re.escape, sorted(tops)))})(?![\w-]))")

    @property
    def root(self) -> Path:
        """The private tree."""
        return self._tree

    def rewritten(self, text: str) -> str:
        """Return `text` with every fixed path moved into the private tree."""
        return self._fixed.sub(lambda _: f"{self._tree}/", text)

    async def start(self) -> None:
        """Make the tree."""
        self._register.write(
            Holding(id=self._id, owner=current_process(), tree=str(self._tree), is_marked=True)
        )
        for directory in self._directories:
            (self._tree / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def argv(self, command: str, *, cwd: str) -> list[str]:
        """Return the program that runs a shell command in the tree."""
        self._rewrite_scripts()
        inside = self._tree / cwd.lstrip("/")
        return ["bash", "-c", 'cd -- "$0" && eval "$1"', str(inside), self.rewritten(command)]

    def environment(self) -> Mapping[str, str]:
        """Return the variables that commands start from; nothing comes from this process."""
        python = Path(sys.base_prefix).resolve() / "bin"
        return {
            MARKER: self._id,
            "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._tree / "root"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "TMUX_TMPDIR": str(self._tree / "tmp"),
            "TMPDIR": str(self._tree / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def check_running(self) -> None:
        """Nothing to check: commands are processes of their own."""

    async def stop(self) -> None:
        """Kill every marked process and remove the tree."""
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        kill_marked(self._id)
        remove_tree(self._tree)
        self._register.remove(self._id)

    def _rewrite_scripts(self) -> None:
        """Rewrite the scripts of the task, which arrive at any time before they run."""
        uploaded = [path for top in ("tests", "solution") for path in (self._tree / top).rglob("*")]
        for script in uploaded:
            if script.suffix in _SCRIPT_SUFFIXES and script.is_file() and not script.is_symlink():
                text = script.read_text(errors="surrogateescape")
                if (moved := self.rewritten(text)) != text:
                    script.write_text(moved, errors="surrogateescape")
                    shutil.copymode(script, script)
