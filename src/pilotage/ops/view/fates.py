"""What training did to each sampled token of a rollout: asked of the training code itself.

The rollout is flattened by `build_batch` with every sampled token replaced by a number of its own, so the
samples say which tokens were trained and with which advantage, whatever rules and credit are in force.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import build_batch, mask_stale
from pilotage.loops import LoopSettings, TrainedGroups
from pilotage.types import Logprobs, Rollout, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFate:
    """Of the sampled tokens of one turn."""

    is_trained_K: NDArray[np.bool_]
    advantages_K: NDArray[np.float32]
    """0 where a token is not trained."""
    gaps_K: NDArray[np.float32] | None
    """Trainer's less sampler's log-prob, 0 where a token is not trained; None where no step says."""
    kind: str
    """What became of those that are not trained: `masked` or `dropped`."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFate:
    """Of all turns of a rollout."""

    turns: tuple[TurnFate, ...]
    advantage: float | None
    """Of the rollout within its group; None where it was not compared."""
    trained_tokens: int
    reasons: dict[str, int]
    """Tokens that are not trained, by kind and reason; earlier attempts included."""


def fate_of(
    rollout: Rollout,
    siblings: Sequence[Rollout],
    settings: LoopSettings,
    *,
    step: TrainedGroups | None,
    trainer_logprobs_n: Logprobs | None = None,
) -> RolloutFate:
    """Say what a step did with the tokens of `rollout`.

    Args:
        siblings: the other rollouts of its group, or their skeletons.
        step: the groups of the step that trained it; None where none has yet: tokens are as new as may be.
        trainer_logprobs_n: of the tokens that the step trained; left out where it has another number of them.
    """
    trajectory, rules = rollout.trajectory, settings.batch_rules()
    shadow = replace(rollout, trajectory=_numbered(trajectory))
    compared = [sibling for sibling in siblings if not rules.is_too_long(sibling)]
    others = [replace(sibling, trajectory=Trajectory(), discarded_tokens={}) for sibling in compared]
    batch = build_batch([shadow, *others], rules)
    if step is not None:
        batch = mask_stale(batch, trainer_version=step.trainer_version, max_lag=settings.max_lag)
    trained = np.zeros(trajectory.sampled_tokens, np.bool_)
    advantages = np.zeros(trajectory.sampled_tokens, np.float32)
    order_n = np.zeros(0, np.int32)
    for sample in batch.samples:
        numbers = sample.token_ids[sample.loss_mask]
        trained[numbers] = True
        advantages[numbers] = sample.advantages[sample.loss_mask]
        order_n = np.concatenate([order_n, numbers])
    gaps = None
    if trainer_logprobs_n is not None and trainer_logprobs_n.size == order_n.size > 0:
        gaps = np.zeros(trajectory.sampled_tokens, np.float32)
        sampled = np.concatenate([turn.logprobs for turn in trajectory.turns])
        gaps[order_n] = trainer_logprobs_n - sampled[order_n]
    masked, dropped = dict(batch.ledger.masked_tokens), dict(batch.ledger.dropped_tokens)
    kind, reason = _rest(masked, dropped, rollout)
    turns: list[TurnFate] = []
    at = 0
    for turn in trajectory.turns:
        end = at + turn.completion_ids.size
        is_orphan = bool(trained.any()) and not turn.is_delivered
        turns.append(
            TurnFate(
                is_trained_K=trained[at:end],
                advantages_K=advantages[at:end],
                gaps_K=None if gaps is None else gaps[at:end],
                kind="masked" if is_orphan else kind,
                reason="orphan" if is_orphan else reason,
            )
        )
        at = end
    counts = {f"masked: {name}": count for name, count in masked.items()}
    counts |= {f"dropped: {name}": count for name, count in dropped.items()}
    return RolloutFate(
        turns=tuple(turns),
        advantage=batch.advantages.get(rollout.id),
        trained_tokens=int(trained.sum()),
        reasons=counts,
    )


def _numbered(trajectory: Trajectory) -> Trajectory:
    turns = []
    at = 0
    for turn in trajectory.turns:
        end = at + turn.completion_ids.size
        turns.append(replace(turn, completion_ids=np.arange(at, end, dtype=np.int32)))
        at = end
    return Trajectory(turns=tuple(turns))


def _rest(masked: dict[str, int], dropped: dict[str, int], rollout: Rollout) -> tuple[str, str]:
    """Return the one reason for tokens of delivered turns that are not trained."""
    discarded = rollout.discarded_tokens
    for kind, reasons in (("masked", masked), ("dropped", dropped)):
        for reason, count in reasons.items():
            if reason != "orphan" and count > (discarded.get(reason, 0) if kind == "dropped" else 0):
                return kind, reason
    return "masked", "orphan"
