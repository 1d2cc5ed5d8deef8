"""The command line. Heavy imports happen inside a command's body.

Exit codes: 0 ok, 1 failed, 2 usage or configuration, 130 interrupted.
"""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; every deliberate error is one line on stderr."""
    if sys.version_info < (3, 12):  # noqa: UP036  # run from a checkout, nothing else has said so
        version = ".".join(map(str, sys.version_info[:3]))
        sys.stderr.write(f"pilotage: needs Python 3.12 or 3.13, this is {version}; run `make install`\n")
        return 2
    from pilotage.cli.commands import run

    return run(sys.argv[1:] if argv is None else argv)
