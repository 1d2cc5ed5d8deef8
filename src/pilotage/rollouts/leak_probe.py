"""`LeakProbeAgent`: an agent that looks for the answer where it must not be, and does nothing else."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from pilotage.rollouts.report import AgentFacts, StopReason

LEAK_PROBE_AGENT = "pilotage.rollouts.leak_probe:LeakProbeAgent"
_COPIES = r"""
copies() {
    find / \( -path /proc -o -path /sys -o -path /dev -o -path "$here" \) -prune \
        -o -type f -path "*/$2" -print 2>/dev/null | while read -r copy; do
        shared=$(sort -u "$copy" | comm -12 - <(sort -u "$1") | wc -l)
        [ $((shared * 2)) -le "$(sort -u "$1" | wc -l)" ] || echo "installed copy: $copy"
    done
}
"""
"""Prints files elsewhere that end in the same path and share most lines with one of the tree."""
_PROBE_IP = "1.1.1.1"
"""Any address outside; nothing is sent to it."""


def probe_script(gold_files: Sequence[str]) -> str:
    """Return shell commands that print one line, `KIND: WHAT`, for each thing that gives a task away.

    Args:
        gold_files: paths that have to change; a copy elsewhere is a clean one to compare with.
    """
    ends = {path: "/".join(path.split("/")[-2:]) for path in gold_files}
    return "\n".join(
        [
            'here="$PWD"',
            r"find / \( -path /proc -o -path /sys -o -path /dev \) -prune"
            r" -o \( -name .git -o -name .hg -o -name .svn \) -print 2>/dev/null | sed 's/^/history: /'",
            r"find . -type f \( -name '*.orig' -o -name '*.rej' \) | sed 's/^/patch debris: /'",
            "find . -name '*.pyc' | head -3 | sed 's/^/bytecode: /'",
            "times=$(find . -type f -printf '%T@\\n' | sort -u | wc -l)",
            '[ "$times" -le 1 ] || echo "times: files of $times different times"',
            "find /tests /solution -type f 2>/dev/null | head -3 | sed 's/^/verifier: /'",
            f"timeout 2 bash -c 'exec 3<>/dev/tcp/{_PROBE_IP}/53' 2>/dev/null && echo 'network: open'",
            _COPIES,
            *(f"copies {shlex.quote(path)} {shlex.quote(end)}" for path, end in ends.items()),
            "true",
        ]
    )


class LeakProbeAgent(BaseAgent):
    """Runs the probe; what it found is the last message of its facts, one finding a line."""

    def __init__(
        self, logs_dir: Path, model_name: str | None = None, *, gold_files: Sequence[str] = (), **options: Any
    ) -> None:
        """Take Harbor's arguments, and the paths to look for elsewhere; a model is not used."""
        for unused in ("base_url", "api_key_variable"):
            options.pop(unused, None)
        super().__init__(logs_dir, model_name, **options)
        self._gold_files = gold_files

    @staticmethod
    @override
    def name() -> str:
        return "pilotage-leak-probe"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """Nothing to disable."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to set up."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        result = await environment.exec(probe_script(self._gold_files), timeout_sec=120)
        found = "\n".join(filter(None, [(result.stdout or "").strip(), (result.stderr or "").strip()]))
        facts = AgentFacts(stop_reason=StopReason.FINISHED, turns=0, last_message=found)
        context.metadata = facts.to_metadata()
