"""Real, small implementations of the seams for tests: a sampler that follows a script, a word renderer."""

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pilotage.types import (
    Completion,
    FinishReason,
    Message,
    ParsedReply,
    Role,
    SamplingParams,
    TokenIds,
    ToolCall,
    ToolSchema,
    token_ids,
)

END, ASSISTANT, SYSTEM, USER, TOOL, TOOLS, THINK, END_THINK, CALL = range(9)
"""Ids of the word renderer's markers; words of text start after them and never equal one."""
_FIRST_WORD_ID = 9
_MARKER_OF_ROLE = {Role.SYSTEM: SYSTEM, Role.USER: USER, Role.TOOL: TOOL, Role.ASSISTANT: ASSISTANT}
_CALL_NAME = re.compile(r'"name": *"([^"]*)"')


class WordRenderer:
    """A chat template over whole words and runs of white space; reversible, with a growing vocabulary.

    One message is a role marker, its text, THINK..END_THINK and CALLs for an assistant, and END.
    """

    stop_token_ids = (END,)

    def __init__(self) -> None:
        self._id_of: dict[str, int] = {}
        self._word_of: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Return one id a word or run of white space; no text gives a marker's id."""
        return [self._word_id(word) for word in re.findall(r"\s+|\S+", text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of word ids."""
        return "".join(self._word_of[i - _FIRST_WORD_ID] for i in ids)

    def reply(
        self, content: str = "", *calls: tuple[str, str], reasoning: str = "", is_closed: bool = True
    ) -> list[int]:
        """Return the ids of a sampled turn; a call is a name and the text of its arguments.

        `is_closed=False` leaves out the stop token: the turn was cut by its length.
        """
        ids = [THINK, *self.encode(reasoning), END_THINK] if reasoning else []
        ids += self.encode(content)
        for name, arguments in calls:
            ids += [CALL, *self.encode(f'{{"name": "{name}", "arguments": {arguments}}}')]
        return [*ids, END] if is_closed else ids

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Encode a whole conversation and the generation prompt."""
        ids: list[int] = []
        for tool in tools:
            ids += [TOOLS, *self.encode(f"{tool.name} {tool.description} {json.dumps(tool.parameters)}")]
        return token_ids([*ids, *self._messages(messages), ASSISTANT])

    def render_suffix(
        self, last_id: int | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> TokenIds:
        """Encode what follows a sampled turn."""
        close = [] if last_id == END else [END]
        return token_ids([*close, *self._messages(messages), ASSISTANT])

    def parse(self, completion_ids: TokenIds, tools: Sequence[ToolSchema]) -> ParsedReply:
        """Read reasoning, content and calls; a call that is no JSON is malformed."""
        ids = [i for i in completion_ids.tolist() if i != END]
        reasoning: list[int] = []
        if END_THINK in ids:
            cut = ids.index(END_THINK)
            reasoning, ids = [i for i in ids[:cut] if i != THINK], ids[cut + 1 :]
        starts = [at for at, i in enumerate(ids) if i == CALL] + [len(ids)]
        calls: list[ToolCall] = []
        malformed = 0
        for start, end in itertools.pairwise(starts):
            call, is_good = _read_call(self.decode(_words(ids[start:end])))
            calls.append(call)
            malformed += not is_good
        message = Message(
            role=Role.ASSISTANT,
            content=self.decode(_words(ids[: starts[0]])),
            reasoning=self.decode(_words(reasoning)),
            tool_calls=tuple(calls),
        )
        return ParsedReply(message=message, malformed_calls=malformed)

    def _messages(self, messages: Sequence[Message]) -> Iterator[int]:
        for message in messages:
            yield _MARKER_OF_ROLE[message.role]
            if message.role is Role.ASSISTANT:
                calls = [(call.name, call.arguments) for call in message.tool_calls]
                yield from self.reply(message.content, *calls, reasoning=message.reasoning)
            else:
                yield from self.encode(message.content)
                yield END

    def _word_id(self, word: str) -> int:
        if word not in self._id_of:
            self._id_of[word] = _FIRST_WORD_ID + len(self._word_of)
            self._word_of.append(word)
        return self._id_of[word]


def _words(ids: Iterable[int]) -> list[int]:
    return [i for i in ids if i >= _FIRST_WORD_ID]


def _read_call(text: str) -> tuple[ToolCall, bool]:
    name = _CALL_NAME.search(text)
    try:
        value: Any = json.loads(text)
        arguments = value["arguments"]
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be an object")
        return ToolCall(id="", name=str(value["name"]), arguments=json.dumps(arguments)), True
    except (ValueError, KeyError, TypeError):
        return ToolCall(id="", name=name[1] if name else "unknown", arguments=text), False


type Script = Sequence[int] | Exception
"""What one sampler call does: returns these ids, or raises."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerCall:
    """What the sampler was given, and what it answered."""

    prompt_ids: TokenIds
    params: SamplingParams
    session_id: str
    turn_index: int
    completion_ids: TokenIds | None = None
    """None where it raised."""


@dataclass(slots=True, kw_only=True)
class ScriptedSampler:
    """Answers calls from a script, or from a function of the prompt, and keeps what it was asked."""

    script: Iterator[Script] | Callable[[TokenIds], Script]
    max_context_tokens: int = 1 << 20
    latency_s: float | None = None
    """None answers without giving up the event loop."""
    weights_version: int = 0
    gate: asyncio.Event | None = None
    """Where set, a call waits for it before it answers."""
    calls: list[SamplerCall] = field(default_factory=list[SamplerCall])
    num_started: int = 0
    num_cancelled: int = 0

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """Return the next scripted completion, cut to `params.max_tokens`."""
        self.num_started += 1
        await self._wait()
        step = self.script(prompt_ids) if callable(self.script) else next(self.script)
        given = (prompt_ids.copy(), params, session_id, turn_index)
        if isinstance(step, Exception):
            self._note(*given)
            raise step
        ids = token_ids(step)[: params.max_tokens]
        self._note(*given, completion_ids=ids)
        return Completion(
            token_ids=ids.copy(),
            logprobs=(-0.5 / (1 + np.arange(ids.size))).astype(np.float32),
            weights_versions=np.full(ids.size, self.weights_version, np.int32),
            finish_reason=FinishReason.STOP if ids.size and ids[-1] == END else FinishReason.LENGTH,
        )

    async def _wait(self) -> None:
        try:
            if self.latency_s is not None:
                await asyncio.sleep(self.latency_s)
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def _note(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        session_id: str,
        turn_index: int,
        completion_ids: TokenIds | None = None,
    ) -> None:
        self.calls.append(
            SamplerCall(
                prompt_ids=prompt_ids,
                params=params,
                session_id=session_id,
                turn_index=turn_index,
                completion_ids=completion_ids,
            )
        )
