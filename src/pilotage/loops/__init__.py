"""The training loop and the run directory.

Invariant: which tasks come in which order, and what a rollout draws, depends on the seed alone, and no
finished rollout is lost, so that a run that was killed at any time goes on as if it had not been. The loop
meets its trainer and its runner through Protocols; it does not know which they are.
"""

from pilotage.loops.rollout_files import read_rollout, write_rollout
from pilotage.loops.run_directory import RunDirectory, TrainedGroups
from pilotage.loops.schedule import Stragglers
from pilotage.loops.settings import EvaluationSettings, LoopSettings
from pilotage.loops.training_loop import Observer, TrainingLoop

__all__ = [
    "EvaluationSettings",
    "LoopSettings",
    "Observer",
    "RunDirectory",
    "Stragglers",
    "TrainedGroups",
    "TrainingLoop",
    "read_rollout",
    "write_rollout",
]
