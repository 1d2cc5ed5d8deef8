"""The doctor's look at a recipe's policy: its template, and the sampler behind it.

Importing torch and transformers is most of the doctor's time and holds the interpreter while it lasts, so its
process does nothing else, and this module imports little.
"""

import asyncio
import logging

from pilotage.errors import PilotageError
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error
from pilotage.ops.doctor.need import SamplerNeed
from pilotage.ops.doctor.rendering import check_model_window, check_template, check_tool_parser
from pilotage.ops.doctor.sampler import check_sampler, skip_sampler
from pilotage.recipes import Recipe
from pilotage.recipes.embedded import open_local
from pilotage.rendering import TemplateRenderer, load_renderer

_FIX_MODEL = "give policy.model a whole model directory"


def check_policy(recipe: Recipe) -> list[Finding]:
    """Judge template, tool parser, window and sampler; where one cannot be used, nothing behind it.

    For a process of its own: it has its own event loop.
    """
    logging.disable(logging.WARNING)  # what is logged here is among the findings
    policy = recipe.policy
    try:
        renderer = load_renderer(policy.model, enable_thinking=policy.enable_thinking)
    except PilotageError as raised:
        return [from_error(FindingName.TEMPLATE, raised, fix=_FIX_MODEL)]
    findings = [check_template(policy.model), check_tool_parser(renderer)]
    if (window := check_model_window(policy.model, policy.max_context_tokens)) is not None:
        return [*findings, window]
    if recipe.backend != "local":
        return [*findings, *skip_sampler("a service's sampler comes with a job, and this starts none")]
    return [*findings, *asyncio.run(_check_local_sampler(recipe, renderer))]


async def _check_local_sampler(recipe: Recipe, renderer: TemplateRenderer) -> list[Finding]:
    need = SamplerNeed(
        max_context_tokens=recipe.policy.max_context_tokens,
        temperature=recipe.loop.sampling.temperature,
        max_tokens=recipe.loop.sampling.max_tokens,
    )
    try:
        engine = await open_local(recipe, recipe.policy.model, renderer)
    except ModuleNotFoundError as raised:
        fix = "pip install 'pilotage[local]', or make install"
        return [error(FindingName.SAMPLER, f"the local engine cannot be imported: {raised}", fix=fix)]
    except PilotageError as raised:
        return [from_error(FindingName.SAMPLER, raised, fix=_FIX_MODEL)]
    try:
        return await check_sampler(engine, renderer, need)
    finally:
        await engine.close()
