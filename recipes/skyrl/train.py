"""Trains with SkyRL's own trainer on rollouts of Pilotage.

    python recipes/skyrl/train.py RECIPE trainer.policy.model.path=MODEL [SkyRL's other settings, a.b=value]

Of the recipe are read `policy.model` (tokenizer and chat template), `policy.max_context_tokens`, all of
`rollouts`, and what is trained of rollouts that were cut short. All else, sampling included, is SkyRL's.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

try:
    import ray
    from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray
except ModuleNotFoundError as error:
    sys.exit(f"train: {error.name} is not installed in this environment; docs/how-to.md says how to make one")

from pilotage.integrations.skyrl import InferenceClient, SkyRLGenerator, SkyRLSampler
from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.recipes import Recipe, load_recipe
from pilotage.recipes.stack import runner_settings
from pilotage.rendering import load_renderer
from pilotage.rollouts import HarborRunner

NEEDED = (
    "generator.step_wise_trajectories=true",
    "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs",
)
"""What `SkyRLGenerator` demands; said here, so that nobody has to."""


class Experiment(BasePPOExp):
    """SkyRL's experiment, with rollouts of a recipe."""

    def __init__(self, cfg: SkyRLTrainConfig, recipe: Recipe) -> None:
        self.recipe = recipe
        super().__init__(cfg)

    def get_generator(
        self, cfg: SkyRLTrainConfig, tokenizer: object, client: InferenceClient
    ) -> SkyRLGenerator:
        """Make proxy, runner and generator; the first two are opened by `rollouts`."""
        policy, rollouts = self.recipe.policy, self.recipe.rollouts
        renderer = load_renderer(policy.model, enable_thinking=policy.enable_thinking)
        sampler = SkyRLSampler(
            client,
            max_context_tokens=policy.max_context_tokens,
            stop_token_ids=renderer.stop_token_ids,
            model=resolve_policy_model_name(cfg),
        )
        self.proxy = ChatCompletionsProxy(sampler, renderer)
        trials = rollouts.trials_directory or Path(cfg.trainer.export_path) / "trials"
        self.runner = HarborRunner(sessions=self.proxy, settings=runner_settings(rollouts, trials))
        return SkyRLGenerator(self.runner, config=cfg.generator, rules=self.recipe.loop.outcome_rules())

    @contextlib.asynccontextmanager
    async def rollouts(self):
        """Serve the proxy and run rollouts while the context is open."""
        async with serve(self.proxy), self.runner:
            yield

    def run(self) -> None:
        """Train, with rollouts, in one event loop."""
        trainer = self._setup_trainer()

        async def train() -> None:
            async with self.rollouts():
                await trainer.train()

        asyncio.run(train())


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig, recipe: Recipe) -> None:
    """Run the experiment away from the head node's own process, as SkyRL does."""
    Experiment(cfg, recipe).run()


def main() -> None:
    """Read the command line, start Ray, and train."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    recipe = load_recipe(Path(sys.argv[1]))
    if recipe.rollouts.ray_address is not None:
        sys.exit("rollouts.ray_address is for Pilotage's own loop; here workers are beside the trainer")
    cfg = SkyRLTrainConfig.from_cli_overrides([*NEEDED, *sys.argv[2:]])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg, recipe))


if __name__ == "__main__":
    main()
