"""A machine of one's own for a campaign: registers, terminals and runs are under one directory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from pilotage.processes import ProcessIdentity, identify, kill
from pilotage.rollouts.register import Register

ROOT = Path(__file__).resolve().parents[2]
_ROLES = (
    ("worker", "pilotage.rollouts.worker"),
    ("supervisor", "pilotage.cli.supervisor"),
    ("driver", "pilotage.cli.driver"),
    ("driver", "tests.chaos.forks"),
    ("service", "-m pilotage serve"),
    ("engine", "pilotage.cli.engine"),
    ("terminal", "tmux -L"),
)
"""What a command line holds, by what the process is; the first that fits counts."""
_SETTLE_S = 20.0
"""What the kernel and processes that are ending may still need."""


@dataclass(frozen=True, slots=True)
class Member:
    """A living process of the machine."""

    role: str
    process: ProcessIdentity
    command: str


class Machine:
    """Runs `pilotage` with everything that it keeps outside a run under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for name in ("runtime", "terminals", "temporary"):
            (root / name).mkdir(mode=0o700)
        self.environment = {name: value for name, value in os.environ.items() if name != "TMUX"} | {
            "XDG_RUNTIME_DIR": str(root / "runtime"),
            "TMUX_TMPDIR": str(root / "terminals"),
            "TMPDIR": str(root / "temporary"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }
        self._forks: subprocess.Popen[str] | None = None

    def pilotage(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        return subprocess.run(
            self._command(words),
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, log: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start a command whose output is appended to the file `log`."""
        with (self.root / log).open("ab") as output:
            return subprocess.Popen(
                self._command(words),
                cwd=self.root,
                env=self.environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, log: str, *words: str) -> ProcessIdentity | None:
        """Start a command without the time that its imports take; None where it has ended already."""
        if self._forks is None:
            self._forks = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.forks"],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        order = {"log": str(self.root / log), "environment": self.environment, "words": words}
        self._forks.stdin.write(json.dumps(order) + "\n")
        self._forks.stdin.flush()
        return identify(int(self._forks.stdout.readline()))

    def clear(self) -> None:
        """Kill every process of the machine, and remove everything but its first directories."""
        while members := self.members():
            for member in members:
                kill(member.process)
            time.sleep(0.05)
        for path in self.root.glob("*/*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def close(self) -> None:
        """End what starts the forks; it is none of a run's own processes."""
        if self._forks is not None:
            self._forks.kill()
            self._forks.wait()

    def members(self) -> list[Member]:
        """Return the living processes that carry the machine's directory in their environment."""
        outside = {os.getpid(), None if self._forks is None else self._forks.pid}
        found: list[Member] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = str(self.root).encode() in (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            process = identify(int(entry.name))
            if is_ours and process is not None and process.pid not in outside:
                role = next((role for role, text in _ROLES if text in command), "other")
                found.append(Member(role, process, command))
        return found

    def sandboxes(self) -> list[ProcessIdentity]:
        """Return the first processes of the sandboxes that are up."""
        return [process for holding in self._register().holdings() for process in holding.processes]

    def leftovers(self) -> list[str]:
        """Return what is left once everything was ended, after what ends of itself has had its time."""
        deadline = time.monotonic() + _SETTLE_S
        while (found := list(self._leftovers())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "pilotage", *words]

    def _register(self) -> Register:
        return Register(self.root / "runtime" / "pilotage")

    def _leftovers(self) -> Iterator[str]:
        for member in self.members():
            yield f"process {member.process.pid}: {member.command[:80]}"
        register = self._register().directory
        for path in [*register.glob("*.json"), *register.glob("trees/*")]:
            yield f"register entry {path.name}"
        for path in self.root.glob("*/*/trials/*"):
            yield f"trial directory {path.name}"
        for path in self.root.glob("**/.*.partial"):
            yield f"unfinished file {path.relative_to(self.root)}"
        for path in (self.root / "temporary").iterdir():
            if not path.name.startswith("torchinductor_"):  # a cache that torch shares between processes
                yield f"temporary file {path.name}"
        for line in Path("/proc/mounts").read_text().splitlines():
            if str(self.root) in line:
                yield f"mount {line.split()[1]}"


@contextlib.contextmanager
def machine(root: Path) -> Generator[Machine]:
    """Make a machine; whatever still runs on it at the end is killed."""
    made = Machine(root)
    try:
        yield made
    finally:
        made.close()
        made.clear()
        shutil.rmtree(root, ignore_errors=True)
