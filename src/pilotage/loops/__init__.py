"""The training loop and the run directory.

Invariant: what a step trains on depends on the seed, the step and the weights alone, so that a run that
was killed at any time goes on with the same tasks in the same order. The loop meets its trainer and its
runner through Protocols; it does not know which they are.
"""

from pilotage.loops.rollout_files import read_rollout, write_rollout
from pilotage.loops.run_directory import RunDirectory
from pilotage.loops.settings import EvaluationSettings, LoopSettings
from pilotage.loops.synchronous import Observer, SynchronousLoop

__all__ = [
    "EvaluationSettings",
    "LoopSettings",
    "Observer",
    "RunDirectory",
    "SynchronousLoop",
    "read_rollout",
    "write_rollout",
]
