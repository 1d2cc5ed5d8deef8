"""Short conversations that exercise what chat templates are known to treat in ways of their own."""

from dataclasses import dataclass

from pilotage.rendering.dialect import dump_json
from pilotage.types import Message, Role, ToolCall, ToolSchema

TURNS = 8

TOOLS = (
    ToolSchema(
        name="run",
        description="Run a command.",
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "limit": {"type": "integer"},
                "is_quiet": {"type": "boolean"},
                "paths": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["command"],
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """One assistant message and what the agent answers."""

    reply: Message
    answers: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named conversation of `TURNS` turns."""

    name: str
    opening: tuple[Message, ...]
    turns: tuple[ScriptedTurn, ...]

    def messages_before(self, turn: int) -> list[Message]:
        """Return what is in the prompt of turn `turn`, counted from 0."""
        past = [message for done in self.turns[:turn] for message in (done.reply, *done.answers)]
        return [*self.opening, *past]


def _called(turn: int, *, calls: int = 1, content: str = "", reasoning: str = "") -> ScriptedTurn:
    arguments = dump_json({"command": f"cat é{turn}.py", "limit": turn, "is_quiet": True, "paths": ["a b"]})
    return ScriptedTurn(
        reply=Message(
            role=Role.ASSISTANT,
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(
                ToolCall(id=f"{turn}-{index}", name="run", arguments=arguments) for index in range(calls)
            ),
        ),
        answers=tuple(
            Message(role=Role.TOOL, content=f"line {turn}\n  {index}", tool_call_id=f"{turn}-{index}")
            for index in range(calls)
        ),
    )


def _talked(turn: int, reasoning: str = "") -> ScriptedTurn:
    return ScriptedTurn(
        reply=Message(role=Role.ASSISTANT, content=f"Answer {turn}.", reasoning=reasoning),
        answers=(Message(role=Role.USER, content=f"And {turn}?"),),
    )


_OPENING = (
    Message(role=Role.SYSTEM, content="You fix bugs."),
    Message(role=Role.USER, content="It fails:\n  see the log."),
)

SCENARIOS = (
    Scenario(name="one call a turn", opening=_OPENING, turns=tuple(_called(turn) for turn in range(TURNS))),
    Scenario(
        name="parallel calls",
        opening=_OPENING,
        turns=tuple(_called(turn, calls=1 + turn % 3) for turn in range(TURNS)),
    ),
    Scenario(
        name="text before a call",
        opening=_OPENING,
        turns=tuple(_called(turn, content="Let me look.") for turn in range(TURNS)),
    ),
    Scenario(
        name="reasoning before a call",
        opening=_OPENING,
        turns=tuple(_called(turn, reasoning="It may be\nthe log.") for turn in range(TURNS)),
    ),
    Scenario(
        name="no system message",
        opening=_OPENING[1:],
        turns=tuple(_called(turn, content="So.", reasoning="Next.") for turn in range(TURNS)),
    ),
    Scenario(name="user messages", opening=_OPENING, turns=tuple(_talked(turn) for turn in range(TURNS))),
    Scenario(
        name="a user message after calls",
        opening=_OPENING,
        turns=tuple(
            _talked(turn, reasoning="Done.") if turn == 3 else _called(turn, reasoning="Next.")
            for turn in range(TURNS)
        ),
    ),
)
