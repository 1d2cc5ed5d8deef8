"""One rollout in the formats of others: Harbor's ATIF and rollout details, and rows for fine-tuning.

    tree of turns -> branches, each from the root to a leaf -> one trajectory, detail or row for each branch

Invariant: the ids are those that were recorded. Messages are what these ids say, for readers without the
tokenizer; nothing here is encoded again.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pilotage.algorithms import to_samples
from pilotage.ops.transcripts import read_messages
from pilotage.rendering import TemplateRenderer
from pilotage.types import Rollout, Trajectory, Turn

ATIF_VERSION = "ATIF-v1.7"
_AGENT_VERSION = "unknown"
"""ATIF wants one; a run does not record its agent's."""


# --- rollout details ---


def rollout_details(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return Harbor's `RolloutDetail` of each branch, the one with the newest turn first.

    Every turn has its whole prompt, so memory is quadratic in the turns of a branch.
    """
    details: list[dict[str, Any]] = []
    for leaf in _branches(trajectory):
        path = trajectory.path(leaf)
        turns = [trajectory.turns[index] for index in path]
        details.append(
            {
                "prompt_token_ids": [trajectory.prompt_ids(index).tolist() for index in path],
                "completion_token_ids": [turn.completion_ids.tolist() for turn in turns],
                "logprobs": [turn.logprobs.tolist() for turn in turns],
                "extra": {"weights_versions": [turn.weights_versions.tolist() for turn in turns]},
            }
        )
    return details


def _branches(trajectory: Trajectory) -> list[int]:
    """Return the leaves, that of the newest turn first: the agent's own conversation ends there."""
    return trajectory.leaves()[::-1]


# --- ATIF ---


def atif_trajectory(
    rollout: Rollout, renderer: TemplateRenderer, *, agent: str, model: str
) -> dict[str, Any]:
    """Return a rollout with at least one turn as an ATIF document.

    The branch of the newest turn is the trajectory; each other branch is embedded, and what it shares is
    marked as copied. A tool's answer is an observation of the step that called it, where one did.
    """
    seen: set[int] = set()
    documents: list[dict[str, Any]] = []
    for leaf in _branches(rollout.trajectory):
        path = rollout.trajectory.path(leaf)
        documents.append(
            {
                "schema_version": ATIF_VERSION,
                "session_id": rollout.id,
                "trajectory_id": f"{rollout.id}/{leaf}",
                "agent": {"name": agent, "version": _AGENT_VERSION, "model_name": model},
                "steps": _steps(rollout.trajectory, path, renderer, seen),
            }
        )
        seen.update(path)
    main, *others = documents
    main["final_metrics"] = {
        "total_completion_tokens": rollout.trajectory.sampled_tokens,
        "total_steps": len(main["steps"]),
    }
    main["extra"] = {
        "task": rollout.task_id,
        "group": rollout.group_id,
        "attempt": rollout.attempt,
        "outcome": str(rollout.outcome),
        "reward": None if rollout.reward is None else rollout.reward.value,
    }
    if others:
        main["subagent_trajectories"] = others
    return main


def _steps(
    trajectory: Trajectory, path: Sequence[int], renderer: TemplateRenderer, copied: set[int]
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for index in path:
        turn = trajectory.turns[index]
        mark = {"is_copied_context": True} if index in copied else {}
        _add_context(steps, turn, renderer, mark)
        steps.append(_agent_step(index, turn, renderer, trajectory.prompt_ids(index).size) | mark)
    return [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]


def _add_context(
    steps: list[dict[str, Any]], turn: Turn, renderer: TemplateRenderer, mark: dict[str, bool]
) -> None:
    """Add what a turn read: tools' answers to the step before, messages as steps of their own."""
    calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())] if steps else []
    caller = steps[-1] if steps else None
    for message in read_messages(renderer.read(turn.context_ids)):
        if message.role == "tool" and caller is not None:
            results = caller.setdefault("observation", {"results": []})["results"]
            call = {"source_call_id": calls[len(results)]} if len(results) < len(calls) else {}
            results.append({**call, "content": message.text})
            continue
        source = {"system": "system", "assistant": "agent"}.get(message.role, "user")
        # An assistant's message in a context was not sampled here: no call of the model stands behind it.
        count = {"llm_call_count": 0} if source == "agent" else {}
        steps.append({"source": source, "message": message.text, **count, **mark})


def _agent_step(index: int, turn: Turn, renderer: TemplateRenderer, prompt_tokens: int) -> dict[str, Any]:
    reply = renderer.parse(turn.completion_ids, ()).message
    step: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(turn.finished_at, UTC).isoformat(),
        "source": "agent",
        "message": reply.content,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": turn.completion_ids.size,
            "completion_token_ids": turn.completion_ids.tolist(),
            "logprobs": turn.logprobs.tolist(),
        },
    }
    if reply.reasoning:
        step["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": f"call_{index}_{number}",
                "function_name": call.name,
                "arguments": _arguments(call.arguments),
            }
            for number, call in enumerate(reply.tool_calls)
        ]
    return step


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"malformed": text}


# --- supervised fine-tuning ---


def fine_tuning_rows(rollout: Rollout, renderer: TemplateRenderer) -> Iterator[dict[str, Any]]:
    """Yield a row for each branch that has tokens of its own, each sampled token a target exactly once.

    `input_ids` and `assistant_masks` are what TRL's `SFTTrainer` takes as they are; `messages` is the same as
    text, calls in the policy's own markup. Turns that were never delivered are no example.

    Args:
        rollout: one with a reward.
    """
    assert rollout.reward is not None
    samples = to_samples(rollout.trajectory, sequence_id=rollout.id, group_id=rollout.group_id, advantage=1.0)
    for sample in samples:
        said = read_messages(renderer.read(sample.token_ids))
        yield {
            "rollout": rollout.id,
            "task": rollout.task_id,
            "reward": rollout.reward.value,
            "input_ids": sample.token_ids,
            "assistant_masks": sample.loss_mask.astype(np.int8),
            "messages": [{"role": message.role, "content": message.text} for message in said],
        }
