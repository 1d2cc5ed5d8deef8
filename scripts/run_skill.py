"""Do what the skill says: run every block of SKILL.md, in order, and nothing else.

    python scripts/run_skill.py

The `pilotage` beside this Python is used. Ends with the exit code of the first command that fails.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKILL = ROOT / "skills" / "pilotage" / "SKILL.md"


def blocks(text: str) -> list[str]:
    """Return the blocks of commands of a page."""
    return re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def main() -> int:
    """Run the blocks as one shell would."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks(SKILL.read_text(encoding="utf-8")):
        for line in block.splitlines():
            print(f"$ {line}", flush=True)
            done = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env=os.environ | {"PATH": path}, check=False
            )
            if done.returncode != 0:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
