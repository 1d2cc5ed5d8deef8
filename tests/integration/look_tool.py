"""A tool that runs in this process and touches nothing, for conversations with the real OpenHands SDK."""

from collections.abc import Sequence
from typing import Any, Self

from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool
from pydantic import Field


class LookAction(Action):
    """Where to look."""

    place: str = Field(description="Where to look.")
    depth: int = Field(default=1, description="How far.")


class LookObservation(Observation):
    """What was seen."""


class LookExecutor(ToolExecutor[LookAction, LookObservation]):
    """Sees the place's name, so that equal actions have equal results."""

    def __call__(self, action: LookAction, conversation: Any = None) -> LookObservation:
        return LookObservation.from_text(text=f"saw {action.place} at {action.depth}")


class LookTool(ToolDefinition[LookAction, LookObservation]):
    """The tool as the SDK wants it."""

    @classmethod
    def create(cls, conv_state: Any = None, **params: Any) -> Sequence[Self]:
        return [
            cls(
                description="Look at a place.",
                action_type=LookAction,
                observation_type=LookObservation,
                executor=LookExecutor(),
            )
        ]


TOOL_NAME = "look"
register_tool(TOOL_NAME, LookTool)
