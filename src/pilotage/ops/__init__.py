"""Operations on runs: what a person reads. Nothing here trains or changes a run's state."""

from pilotage.ops.graph import write_reward_graph
from pilotage.ops.report import format_comparison, format_report
from pilotage.ops.show import format_rollout, format_run

__all__ = ["format_comparison", "format_report", "format_rollout", "format_run", "write_reward_graph"]
