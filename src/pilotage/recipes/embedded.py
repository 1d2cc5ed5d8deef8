"""The engine in this process, as a recipe wants it: apart from the stack, for processes that only sample."""

from pathlib import Path
from typing import TYPE_CHECKING

from pilotage.recipes.config import Recipe
from pilotage.rendering import TemplateRenderer

if TYPE_CHECKING:
    from pilotage.engine import LocalEngine


async def open_local(recipe: Recipe, model: Path, renderer: TemplateRenderer) -> "LocalEngine":
    """Open the local engine on `model` with the recipe's sizes; an adapter goes onto the recipe's model."""
    from pilotage.engine import LocalEngine  # imports torch, which a driver of a service does without
    from pilotage.engine.adapter_checkpoint import find_adapter
    from pilotage.engine.lora import LoraOptions

    policy = recipe.policy
    lora = LoraOptions.of(policy.peft_config, seed=recipe.loop.seed)
    has_adapter = lora is not None and find_adapter(model) is not None
    engine = await LocalEngine.open(
        policy.model if has_adapter else model,
        max_context_tokens=policy.max_context_tokens,
        max_batch=policy.max_batch,
        stop_token_ids=renderer.stop_token_ids,
        trainer_threads=policy.trainer_threads,
        micro_batch_tokens=policy.micro_batch_tokens,
        lora=lora,
    )
    if has_adapter:
        try:
            await engine.load(model, weights_only=True)
            await engine.publish()
        except BaseException:
            await engine.close()
            raise
    return engine
