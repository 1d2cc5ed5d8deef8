"""The program of a launched driver: `python -m pilotage.cli.driver PARENT ARGUMENTS...` of `pilotage`."""

import signal
import sys

from pilotage.cli import main
from pilotage.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, parent=int(sys.argv[1]))  # a clean stop, should its supervisor be killed
    sys.exit(main(sys.argv[2:]))
