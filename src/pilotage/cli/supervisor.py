"""The program of a launcher: `python -m pilotage.cli.supervisor RUN RESTARTS ARGUMENTS...`."""

import logging
import sys
from pathlib import Path

from pilotage.errors import PilotageError
from pilotage.ops.supervisor import Supervisor


def main() -> int:
    """Supervise one run; started by `pilotage launch`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    run, restarts, *command = sys.argv[1:]
    try:
        return Supervisor(Path(run), command, restarts=int(restarts)).run()
    except PilotageError as error:
        sys.stderr.write(f"pilotage: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
