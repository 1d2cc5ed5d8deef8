"""Records of a run as a loop writes them, with numbers that are easy to add up."""

from pilotage.ops.report import Record
from pilotage.types import BranchCause, Outcome


def make_record(
    step: int, reward: float, *, count: int = 4, completed: int | None = None, **more: float
) -> dict[str, float]:
    """Of each rollout ten tokens were sampled: six trained, three masked, one dropped."""
    record: dict[str, float] = {
        "step": step,
        "weights_version": step + 1,
        "reward/mean": reward,
        "reward/count": count,
        "reward/none_count": 0,
        "ledger/sampled_tokens": 10 * count,
        "ledger/trained_tokens": 6 * count,
        "ledger/masked_tokens": 3 * count,
        "ledger/masked_tokens/orphan": 3 * count,
        "ledger/dropped_tokens": count,
        "ledger/dropped_tokens/no_spread": count,
        "policy/logprob_gap_max": 1e-6 * step,
        "policy/clip_fraction": 0.25,
        "time/step_s": float(step),
        **{f"branch/{cause}": 0 for cause in BranchCause},
        **{f"outcome/{outcome}": 0 for outcome in Outcome},
        "outcome/completed": count if completed is None else completed,
    }
    return record | more


def make_evaluation(step: int, mean: float, **more: float) -> Record:
    """Only an evaluation, as before the first step."""
    return {"step": step, "weights_version": 1, "eval/reward_mean": mean, "eval/count": 32, **more}
