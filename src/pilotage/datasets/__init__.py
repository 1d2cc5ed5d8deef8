"""Tasks: reading directories of Harbor tasks, and making localization tasks from packages.

`package_tasks` takes installed ones and proves nothing; `factory` takes source archives and proves each bug
by the package's tests. `factory` needs libcst and pytest, so it is imported where it is used.

Harbor's own validation happens where Harbor is (`rollouts`); here a directory is only checked for what
every run needs, so that a wrong path is refused before anything starts.
"""

from pilotage.datasets.baselines import BaselineScores, score_baselines
from pilotage.datasets.bugs import Bug, find_bugs
from pilotage.datasets.contamination import overlaps
from pilotage.datasets.harbor_tasks import load_tasks
from pilotage.datasets.localization_tasks import issue_of
from pilotage.datasets.package_tasks import DEMO_HELD_OUT, DEMO_TRAIN, write_package_tasks

__all__ = [
    "DEMO_HELD_OUT",
    "DEMO_TRAIN",
    "BaselineScores",
    "Bug",
    "find_bugs",
    "issue_of",
    "load_tasks",
    "overlaps",
    "score_baselines",
    "write_package_tasks",
]
