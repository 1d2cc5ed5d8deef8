"""`python -m pilotage`."""

from pilotage.cli import main

raise SystemExit(main())
