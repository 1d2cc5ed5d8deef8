"""Settings of the loop, as they stand in a recipe."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pilotage.algorithms import BatchRules
from pilotage.loops.curriculum import CurriculumSettings
from pilotage.loops.schedule import Stragglers
from pilotage.types import (
    CUT_SHORT_OUTCOMES,
    OUTCOME_RULES,
    AdamParams,
    LossConfig,
    Outcome,
    OutcomeRule,
    SamplingParams,
)

type CutShort = Literal["train", "mask"]


class EvaluationSettings(BaseModel):
    """Held-out evaluation: one rollout of every held-out task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_steps: int = Field(default=10, ge=1)
    """Also before the first step and after the last."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""


class LoopSettings(BaseModel):
    """Sample groups, score, one update, publish, repeat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    """Of the order of tasks and of all sampling."""
    num_steps: int = Field(default=50, ge=1)
    """Optimizer steps."""
    tasks_per_step: int = Field(default=8, ge=1)
    """Groups of a step."""
    group_size: int = Field(default=4, ge=2)
    """Rollouts of one task, which share a baseline."""
    max_lag: int = Field(default=0, ge=0)
    """Steps that the rollouts of a batch may have fallen behind. With 0 the groups of a step start when the
    step before it is done; with more, those of as many further steps are under way while the trainer works,
    and tokens from more versions back than this are masked."""
    stragglers: Stragglers = Stragglers.WAIT
    """Whether the trainer waits for groups that would else exceed `max_lag`, or masks their old tokens."""
    refill: bool = False
    """Whether a group that gives no gradient is replaced by the next one, and not a smaller batch made."""
    curriculum: CurriculumSettings | None = None
    """Draws tasks by their pass rates; without it each epoch holds every task once."""
    checkpoint_every_steps: int = Field(default=5, ge=1)
    """Also after the last step."""
    scale_advantages_by_std: bool = False
    """Whether advantages are divided by their group's deviation."""
    max_rollout_tokens: int | None = Field(default=None, ge=1)
    """A rollout that sampled more tokens is masked, and out of its group's baseline."""
    min_group_reward: float | None = None
    """A group with a smaller mean reward is dropped ..."""
    max_group_reward: float | None = None
    """... and so is one with a larger mean."""
    max_idle_steps: int = Field(default=5, ge=1)
    """The run stops after this many steps in a row without a gradient, or so many steps' groups to refill."""
    turns_exhausted: CutShort = "mask"
    """Whether rollouts that ended so are trained; what is masked is out of the baseline too."""
    context_exceeded: CutShort = "train"
    """As above."""
    tokens_exhausted: CutShort = "train"
    """As above."""
    sampling: SamplingParams = SamplingParams()
    """Of training rollouts; each gets a seed of its own, so `sampling.seed` is not read."""
    evaluation: EvaluationSettings = EvaluationSettings()
    loss: LossConfig = LossConfig()
    optimizer: AdamParams = AdamParams()
    lr_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: `optimizer.learning_rate` holds in the first step, and falls evenly to 0 after the last."""

    def optimizer_at(self, step: int) -> AdamParams:
        """Return the settings of the optimizer in a step, counted from 1."""
        if self.lr_schedule == "constant":
            return self.optimizer
        left = (self.num_steps - step + 1) / self.num_steps
        return replace(self.optimizer, learning_rate=self.optimizer.learning_rate * left)

    @model_validator(mode="after")
    def _keep_the_ratio_true(self) -> Self:
        """Refuse sampling whose log-probs are not those of the policy that the loss speaks of."""
        sampling = self.sampling
        if sampling.temperature != self.loss.temperature:
            raise ValueError(
                f"sampling.temperature {sampling.temperature} differs from loss.temperature"
                f" {self.loss.temperature};"
                " the importance ratio needs them equal"
            )
        if sampling.top_p != 1 or sampling.top_k != 0:
            raise ValueError(
                "training needs sampling.top_p = 1 and sampling.top_k = 0: both renormalise the log-probs"
            )
        return self

    @model_validator(mode="after")
    def _keep_some_groups(self) -> Self:
        low, high = self.min_group_reward, self.max_group_reward
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_group_reward {low} is above max_group_reward {high}: no group would be left"
            )
        return self

    def batch_rules(self) -> BatchRules:
        """Return how the rollouts of a step become a batch."""
        return BatchRules(
            outcomes=self.outcome_rules(),
            scale_by_std=self.scale_advantages_by_std,
            max_rollout_tokens=self.max_rollout_tokens,
            min_group_reward=self.min_group_reward,
            max_group_reward=self.max_group_reward,
        )

    def outcome_rules(self) -> dict[Outcome, OutcomeRule]:
        """Return the table of outcomes with this recipe's choices; what is masked is out of the baseline."""
        rules = dict(OUTCOME_RULES)
        for outcome in CUT_SHORT_OUTCOMES:
            is_trained = getattr(self, outcome.value) == "train"
            rules[outcome] = OutcomeRule(has_reward=True, is_trained=is_trained, in_baseline=is_trained)
        return rules
