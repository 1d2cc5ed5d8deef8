"""Short ways to write messages, and generators of conversations."""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pilotage.types import Message, Role, ToolCall, ToolSchema

TERMINAL = ToolSchema(
    name="terminal",
    description="Run a command; 80 % of them are fast.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "timeout": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "is_input": {"type": "boolean"},
            "security_risk": {"type": "string", "enum": ["LOW", "HIGH"]},
            "summary": {"type": "string"},
        },
        "required": ["command"],
    },
)
FINISH = ToolSchema(
    name="localization_finish",
    parameters={"type": "object", "properties": {"locations": {"type": "array"}}},
)
TOOLS = (TERMINAL, FINISH)


def system(text: str = "You find bugs.") -> Message:
    return Message(role=Role.SYSTEM, content=text)


def user(text: str = "It fails.") -> Message:
    return Message(role=Role.USER, content=text)


def tool(text: str, call_id: str = "0") -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call_id)


def assistant(content: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


def call(name: str = "terminal", **arguments: object) -> ToolCall:
    return made_call(name, arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """An opening and turns: each a reply with the messages that answer it."""

    opening: tuple[Message, ...]
    turns: tuple[tuple[Message, tuple[Message, ...]], ...]

    def before(self, turn: int) -> list[Message]:
        """Messages in the prompt of turn `turn`."""
        return [
            *self.opening,
            *(message for reply, answers in self.turns[:turn] for message in (reply, *answers)),
        ]


# Words and line breaks in every mixture; no control token, no think tag, no white space at the ends.
_words = st.text(alphabet="abz AZ09\n\t._-/(){}[]\"'\\:,<>=%éü漢😀e\u0301", max_size=40)
texts = _words.map(str.strip)
arguments = st.dictionaries(
    st.sampled_from(["command", "timeout", "is_input"]),
    st.one_of(texts, st.integers(-5, 5), st.booleans(), st.lists(texts, max_size=2)),
)


def _stays_json(text: str) -> bool:
    """Say whether a JSON string is one after the Qwen tokenizer has composed its characters (NFC): a line
    break before an accent is not, as its escape's `n` takes the accent.
    """
    try:
        composed = json.loads(unicodedata.normalize("NFC", json.dumps(text, ensure_ascii=False)))
    except json.JSONDecodeError:
        return False
    return composed == unicodedata.normalize("NFC", text)


typed_arguments = st.fixed_dictionaries(
    {"command": texts.filter(_stays_json)},
    optional={"timeout": st.none() | st.integers(-5, 5), "is_input": st.booleans()},
)


def calls(min_size: int) -> st.SearchStrategy[list[ToolCall]]:
    one = st.builds(made_call, st.sampled_from([offered.name for offered in TOOLS]), arguments)
    return st.lists(one, min_size=min_size, max_size=3)


def typed_calls() -> st.SearchStrategy[list[ToolCall]]:
    """Calls of the terminal whose arguments have the types of its schema."""
    return st.lists(st.builds(made_call, st.just("terminal"), typed_arguments), max_size=3)


def made_call(name: str, values: dict[str, object]) -> ToolCall:
    return ToolCall(id="0", name=name, arguments=json.dumps(values, ensure_ascii=False))


@st.composite
def tool_loops(draw: st.DrawFn, *, reasoning: bool) -> Conversation:
    """One query, then turns of one to three calls with their results."""
    turns: list[tuple[Message, tuple[Message, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        made = draw(calls(min_size=1))
        thought = draw(texts.filter(bool)) if reasoning else ""
        reply = assistant(draw(texts), *made, reasoning=thought)
        turns.append((reply, tuple(tool(draw(texts)) for _ in made)))
    opening = [user(draw(texts))]
    if draw(st.booleans()):
        opening.insert(0, system(draw(texts)))
    return Conversation(opening=tuple(opening), turns=tuple(turns))


@st.composite
def dialogues(draw: st.DrawFn, *, reasoning: bool) -> Conversation:
    """Turns with and without calls; after a turn without calls the user speaks."""
    turns: list[tuple[Message, tuple[Message, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        made = draw(calls(min_size=0))
        reply = assistant(draw(texts), *made, reasoning=draw(texts) if reasoning else "")
        answers = tuple(tool(draw(texts)) for _ in made) or (user(draw(texts)),)
        turns.append((reply, answers))
    return Conversation(opening=(system(draw(texts)), user(draw(texts))), turns=tuple(turns))


def scripted_loop(num_turns: int, *, content: str = "", reasoning: str = "") -> Conversation:
    """A fixed loop whose turns have one, two, three, one ... calls."""
    turns: list[tuple[Message, tuple[Message, ...]]] = []
    for turn in range(num_turns):
        made = [call(command=f"cat {turn}.py", timeout=turn) for _ in range(1 + turn % 3)]
        answers = tuple(tool(f"line {turn}\n\tof file {index}") for index in range(len(made)))
        turns.append((assistant(content, *made, reasoning=reasoning), answers))
    return Conversation(opening=(system(), user()), turns=tuple(turns))


def flatten(conversation: Conversation) -> Sequence[Message]:
    return conversation.before(len(conversation.turns))
