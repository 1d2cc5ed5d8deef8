"""Random rollouts, and the plain way to make one by hand."""

import numpy as np
from hypothesis import strategies as st

from pilotage.types import (
    FinishReason,
    Outcome,
    Reward,
    Rollout,
    SamplingParams,
    Trajectory,
    Turn,
)


def make_turn(
    parent: int | None,
    context: list[int],
    completion: list[int],
    *,
    is_delivered: bool = True,
    version: int = 0,
) -> Turn:
    """Log-probs are -id / 100, so that a test can tell which token one belongs to."""
    return Turn(
        parent=parent,
        context_ids=np.array(context, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=(-np.array(completion) / 100).astype(np.float32),
        weights_versions=np.full(len(completion), version, np.int32),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        is_delivered=is_delivered,
        started_at=0.0,
        finished_at=1.0,
    )


def make_rollout(
    rollout_id: str,
    *turns: Turn,
    reward: float | None,
    group_id: str = "group",
    outcome: Outcome = Outcome.COMPLETED,
) -> Rollout:
    """Without turns: one turn of two prompt tokens and three sampled ones."""
    return Rollout(
        id=rollout_id,
        group_id=group_id,
        task_id="task",
        attempt=0,
        outcome=outcome,
        reward=None if reward is None else Reward(value=reward, key="reward", source="reward.json"),
        trajectory=Trajectory(turns=turns or (make_turn(None, [1, 2], [3, 4, 5]),)),
    )


def random_trajectory(rng: np.random.Generator) -> Trajectory:
    """A tree of up to eight turns, with orphans, empty contexts and empty completions."""
    turns: list[Turn] = []
    for index in range(rng.integers(0, 9)):
        parent = int(rng.integers(-1, index))
        turns.append(
            make_turn(
                None if parent < 0 else parent,
                rng.integers(0, 100, rng.integers(0, 4)).tolist(),
                rng.integers(0, 100, rng.integers(0, 4)).tolist(),
                is_delivered=bool(rng.random() < 0.75),
                version=int(rng.integers(0, 4)),
            )
        )
    return Trajectory(turns=tuple(turns))


def random_step(rng: np.random.Generator) -> list[Rollout]:
    """Rollouts of a step: any outcome, any reward or none, groups interleaved."""
    return [
        make_rollout(
            f"rollout-{index}",
            *random_trajectory(rng).turns,
            reward=None if rng.random() < 0.3 else float(rng.choice([0.0, 0.5, 1.0, 3.0])),
            group_id="abc"[rng.integers(0, 3)],
            outcome=list(Outcome)[rng.integers(0, len(Outcome))],
        )
        for index in range(rng.integers(0, 9))
    ]


# One drawn number seeds each case: drawing every token by itself takes a hundred times as long.
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
trajectories = generators.map(random_trajectory)
steps = generators.map(random_step)
