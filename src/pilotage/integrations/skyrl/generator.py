"""The generator: SkyRL's trainer asks, a runner runs, the recorded trees come back as rows."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from pilotage.errors import ConfigError
from pilotage.integrations.skyrl.interface import (
    GeneratorConfig,
    GeneratorInput,
    GeneratorOutput,
    TrajectoryId,
)
from pilotage.integrations.skyrl.requests import is_training, rollout_requests
from pilotage.integrations.skyrl.rows import Batch
from pilotage.interfaces import RolloutRunner
from pilotage.types import OUTCOME_RULES, Outcome, OutcomeRule, Rollout


class SkyRLGenerator:
    """Implements SkyRL's `GeneratorInterface` with rollouts of Harbor tasks.

    Each branch of a rollout is one row, so `generator.step_wise_trajectories` must be on: with it SkyRL
    takes several rows for one trajectory, compares trajectories by their last rows, and gives all rows the
    advantage. Every row bears its rollout's reward, and `stop_reasons` its outcome. Concurrent calls share
    the runner's limits.

    Args:
        runner: runs one rollout; open while `generate` is called.
        config: SkyRL's `cfg.generator`.
        rules: what each outcome means; a recipe's are `recipe.loop.outcome_rules()`.

    Raises:
        ConfigError: SkyRL's settings or the rules say what the rows cannot express.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        *,
        config: GeneratorConfig,
        rules: Mapping[Outcome, OutcomeRule] = OUTCOME_RULES,
    ) -> None:
        _check(config, rules)
        self._runner = runner
        self._rules = rules
        self._numbers = itertools.count()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run one rollout for each trajectory of the batch.

        Returns:
            Rows in the order of the batch, those of a prompt together. Rollouts without a reward have none.

        Raises:
            ConfigError: the batch asks for what rollouts cannot have.
            RewardError: an evaluation of which no rollout has a reward.
        """
        requests = rollout_requests(input_batch, self._numbers)
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._runner.run(request)) for request in requests]
        rollouts = [task.result() for task in tasks]
        batch = Batch(rules=self._rules, is_training=is_training(input_batch))
        for ids, group in _groups(input_batch["trajectory_ids"] or (), rollouts):
            batch.add_group(ids, group)
        return batch.finished(rollouts)


def _check(config: GeneratorConfig, rules: Mapping[Outcome, OutcomeRule]) -> None:
    if not config.step_wise_trajectories:
        raise ConfigError(
            "set generator.step_wise_trajectories=true: a rollout with several branches has several rows"
        )
    for name in ("apply_overlong_filtering", "zero_reward_on_non_stop"):
        if getattr(config, name):
            raise ConfigError(
                f"generator.{name} has no effect on rollouts; set it to false, and loop.context_exceeded,"
                " loop.tokens_exhausted and loop.turns_exhausted in the recipe"
            )
    if config.inference_engine.engine_init_kwargs.get("logprobs_mode") != "processed_logprobs":
        raise ConfigError(
            "set generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs: vLLM's own"
            " log-probs are those of temperature 1, whatever it samples at"
        )
    for outcome, rule in rules.items():
        if rule.is_trained != rule.in_baseline:
            raise ConfigError(
                f"outcome {outcome}: trained and counted in the baseline must be the same for SkyRL,"
                " which compares the rows that it trains"
            )


def _groups(
    ids: Sequence[TrajectoryId], rollouts: Sequence[Rollout]
) -> list[tuple[list[TrajectoryId], list[Rollout]]]:
    groups: dict[str, tuple[list[TrajectoryId], list[Rollout]]] = {}
    for identity, rollout in zip(ids, rollouts, strict=True):
        of_group, of_rollouts = groups.setdefault(identity.instance_id, ([], []))
        of_group.append(identity)
        of_rollouts.append(rollout)
    return list(groups.values())
