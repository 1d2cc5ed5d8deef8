"""Judge a model's chat template and its renderer."""

import json
from pathlib import Path

import numpy as np

from pilotage.errors import PilotageError, TemplateError
from pilotage.interfaces import Renderer
from pilotage.ops.doctor.findings import Finding, FindingName, error, from_error, ok
from pilotage.rendering import verify_template
from pilotage.rendering.scripted import SCENARIOS, TOOLS
from pilotage.types import TokenIds

_FIX_TEMPLATE = "use a model of a supported family with its official template (`pilotage verify-template`)"


def check_template(model: Path) -> Finding:
    """Judge a model directory's chat template."""
    try:
        found = verify_template(model)
    except TemplateError as raised:
        return from_error(FindingName.TEMPLATE, raised, fix=_FIX_TEMPLATE)
    family = next((mode.family for mode in found.modes if mode.family), "")
    if not found.is_usable:
        problem = next((mode.problem for mode in found.modes if mode.problem), "the renderer disagrees")
        return error(FindingName.TEMPLATE, f"{model}: {problem}", fix=_FIX_TEMPLATE)
    how = "append-only" if found.is_append_only else "rewrites history itself; what was recorded is extended"
    return ok(FindingName.TEMPLATE, f"{family}: {how}")


def check_model_window(model: Path, max_context_tokens: int) -> Finding | None:
    """Judge the recipe's window by the model's config; None where the config does not say, or allows it."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # opening the model says it better
    most = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    if not isinstance(most, int) or most >= max_context_tokens:
        return None
    return error(
        FindingName.CONTEXT_WINDOW,
        f"policy.max_context_tokens is {max_context_tokens}, and {model} was made for {most}",
        fix=f"set policy.max_context_tokens={most}, or less",
    )


def check_tool_parser(renderer: Renderer) -> Finding:
    """Render a tool call as a turn of the policy, parse its ids, and compare the call."""
    opening, turn = SCENARIOS[0].opening, SCENARIOS[0].turns[1]
    (sent,) = turn.reply.tool_calls
    try:
        before = renderer.render_prompt(opening, TOOLS)
        after = renderer.render_prompt([*opening, turn.reply, *turn.answers], TOOLS)
        reply = renderer.parse(_first_turn(before, after, renderer.stop_token_ids), TOOLS)
    except PilotageError as raised:
        return from_error(FindingName.TOOL_PARSER, raised, fix=_FIX_TEMPLATE)
    calls = [(call.name, _value(call.arguments)) for call in reply.message.tool_calls]
    if reply.malformed_calls or calls != [(sent.name, _value(sent.arguments))]:
        return error(
            FindingName.TOOL_PARSER,
            f"{sent.name}({sent.arguments}) came back as {calls}",
            fix=f"{_FIX_TEMPLATE}; a call that is read otherwise than it was written runs another command",
        )
    return ok(FindingName.TOOL_PARSER, f"a call of {len(json.loads(sent.arguments))} arguments came back")


def _first_turn(before: TokenIds, after: TokenIds, stops: tuple[int, ...]) -> TokenIds:
    """Return the ids of the turn that follows what both renders share, its end included."""
    shared = min(before.size, after.size)
    differing = np.flatnonzero(before[:shared] != after[:shared])
    start = int(differing[0]) if differing.size else shared
    ends = np.flatnonzero(np.isin(after[start:], stops))
    return after[start : start + int(ends[0]) + 1] if ends.size else after[start:]


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
