"""Code localization on SWE-smith: rows to Harbor tasks.

parquet or hub -> rows, each drop with its reason -> a tree for each -> gold recomputed -> task directories
"""

from pilotage.datasets.swe_smith.rows import SWE_SMITH, Row, Rows, check_rows, read_rows
from pilotage.datasets.swe_smith.tasks import TaskOptions, TaskSummary, write_swe_smith_tasks
from pilotage.datasets.swe_smith.trees import CloneTrees, ImageTrees, SdistTrees, TreeSource

__all__ = [
    "SWE_SMITH",
    "CloneTrees",
    "ImageTrees",
    "Row",
    "Rows",
    "SdistTrees",
    "TaskOptions",
    "TaskSummary",
    "TreeSource",
    "check_rows",
    "read_rows",
    "write_swe_smith_tasks",
]
