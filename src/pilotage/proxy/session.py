"""One rollout's stay: its tree, its running sampler calls, its counters.

All on one event loop, so there is no lock: nothing is awaited between reading the tree and writing it.
A sampler call is a task that the session owns. It records its turn before it ends, so whoever answers
afterwards answers from the record. Identical requests share the task; the last one to leave cancels it.
"""

import asyncio
import heapq
import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial

from pilotage.algorithms.hack_gauges import call_signs, output_signs
from pilotage.clock import steady_time
from pilotage.errors import ContextExceededError, SamplerError, TemplateError
from pilotage.interfaces import Renderer, Sampler
from pilotage.proxy.canonical import canonical_reply
from pilotage.proxy.overrides import overridden
from pilotage.proxy.patience import Patience, sample_patiently
from pilotage.proxy.reader import Reader
from pilotage.proxy.refusals import Refusal, bad_request, context_exceeded, turns_exhausted
from pilotage.proxy.requests import TurnRequest
from pilotage.proxy.tree import Attachment, Reply, SessionTree
from pilotage.types import (
    Completion,
    Message,
    ParsedReply,
    Role,
    SamplingParams,
    SessionRecord,
    SessionSpec,
    TokenIds,
    Turn,
)

_LOG = logging.getLogger(__name__)

_THREAD_CHARS = 16_384
"""Encoding more text than this takes over about 5 ms, and goes to a thread."""
_CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What every session of a proxy shares."""

    sampler: Sampler
    renderer: Renderer
    patience: Patience
    honour_dropped_reasoning: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One running sampler call and how many requests wait for it."""

    key: bytes
    draw: int
    """Seeds the sampler, with the session's seed."""
    task: asyncio.Task[int]
    """Returns the index of the recorded turn."""
    num_waiting: int = 0


@dataclass(slots=True)
class _Draws:
    """Hands out the smallest draw index that is not in use, so that a cancelled call's comes back."""

    next_fresh: int = 0
    returned: list[int] = field(default_factory=list[int])

    def take(self) -> int:
        if self.returned:
            return heapq.heappop(self.returned)
        self.next_fresh += 1
        return self.next_fresh - 1

    def give_back(self, index: int) -> None:
        heapq.heappush(self.returned, index)


class Session:
    """The state behind one bearer key."""

    def __init__(self, spec: SessionSpec, policy: Policy) -> None:
        self.spec = spec
        self.tree = SessionTree(honour_dropped_reasoning=policy.honour_dropped_reasoning)
        self.counters: Counter[str] = Counter()
        self._readers: defaultdict[str, Reader] = defaultdict(Reader)
        self._policy = policy
        self._expires_at = time.monotonic() + spec.ttl_s
        self._running: dict[bytes, Call] = {}
        """Calls that somebody waits for, by prompt."""
        self._tasks: set[asyncio.Task[int]] = set()
        """Every task that has not ended, those that nobody waits for any more included."""
        self._draws = _Draws()
        self._turn_of_idempotency_key: dict[tuple[str, bytes], int] = {}
        self._is_context_exceeded = False
        self._sampler_failure = ""

    @property
    def has_expired(self) -> bool:
        """Whether the key's time is over; what was recorded stays until the session is closed."""
        return time.monotonic() >= self._expires_at

    def prolong(self, seconds: float) -> None:
        """Put the end of the key's time off."""
        self._expires_at += seconds

    def reader(self, path: str) -> Reader:
        """Return what reads the requests to one path; dialects spell a message differently."""
        return self._readers[path]

    def note_overrides(self, request: TurnRequest) -> None:
        """Count the sampling options that the agent asked for in vain; log each name once."""
        for name in overridden(request.asked.options, self.spec.sampling):
            counter = f"overridden_{name}"
            self.counters[counter] += 1
            if self.counters[counter] == 1:
                asked = repr(request.asked.options[name])[:80]
                _LOG.warning(
                    "rollout %s: the agent asked for %s=%s; the recipe's stands",
                    self.spec.rollout_id,
                    name,
                    asked,
                )

    def note_fault(self, error: Exception) -> None:
        """Note a fault that nobody foresaw: it is on our side, and must not count as the agent's."""
        self._sampler_failure = f"{type(error).__name__}: {error}"

    def replayed_turn(self, request: TurnRequest) -> int | None:
        """Return the turn that answers a request which its client marked as sent before."""
        turn = self._turn_of_idempotency_key.get((request.idempotency_key, request.key))
        if turn is None and request.is_marked_retry:
            turn = self.tree.newest_answer(request)
        if turn is not None:
            self.counters["replayed"] += 1
        return turn

    async def count_tokens(self, request: TurnRequest) -> int:
        """Return the length of the prompt that would answer `request`, as the sampler would be given it.

        Raises:
            Refusal: 400 where the chat template refuses the messages.
        """
        at = self.tree.attach(request)
        before = 0 if at.parent is None else self.tree.sequence_tokens(at.parent)
        return before + (await self._encode(at, request)).size

    def join(self, request: TurnRequest) -> Call:
        """Return the call that answers `request`: the running one for the same prompt, or a new one.

        The caller waits for `task` and then calls `leave`.

        Raises:
            Refusal: 400 where the turn budget is spent.
        """
        call = self._running.get(request.key)
        if call is None:
            call = self._start(request)
        else:
            self.counters["coalesced"] += 1
        call.num_waiting += 1
        return call

    def leave(self, call: Call) -> None:
        """Stop waiting; the last to leave an unfinished call cancels it, which frees its slot."""
        call.num_waiting -= 1
        if call.num_waiting == 0 and call.task.cancel():
            self._forget(call, is_draw_free=True)

    def deliver(self, turn: int, request: TurnRequest) -> None:
        """Note that a turn is being answered over an open connection."""
        self.tree.deliver(turn)
        if request.idempotency_key:
            self._turn_of_idempotency_key[request.idempotency_key, request.key] = turn

    async def close(self) -> SessionRecord:
        """Cancel what is running and return everything recorded."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks.copy(), timeout=_CLOSE_WAIT_S)
            if stuck:
                _LOG.error(
                    "rollout %s: %d sampler calls ignore cancellation", self.spec.rollout_id, len(stuck)
                )
        trajectory = self.tree.trajectory()
        orphaned = sum(not turn.is_delivered for turn in trajectory.turns)
        return SessionRecord(
            trajectory=trajectory,
            is_context_exceeded=self._is_context_exceeded,
            sampler_failure=self._sampler_failure,
            counters={**self.counters, "orphaned": orphaned},
        )

    def _start(self, request: TurnRequest) -> Call:
        budget = self.spec.max_turns
        if budget is not None and len(self.tree) + len(self._running) >= budget:
            raise turns_exhausted(budget)
        draw = self._draws.take()
        call = Call(key=request.key, draw=draw, task=asyncio.create_task(self._turn(request, draw)))
        self._running[request.key] = call
        self._tasks.add(call.task)
        # First of the callbacks, so that the books are in order when those who wait wake up.
        call.task.add_done_callback(partial(self._finished, call))
        return call

    def _finished(self, call: Call, task: asyncio.Task[int]) -> None:
        self._tasks.discard(task)
        # Reading the exception also tells asyncio that it was not lost: whoever waits raises it.
        self._forget(call, is_draw_free=task.cancelled() or task.exception() is not None)

    def _forget(self, call: Call, *, is_draw_free: bool) -> None:
        if self._running.get(call.key) is call:
            del self._running[call.key]
            if is_draw_free:
                self._draws.give_back(call.draw)

    async def _turn(self, request: TurnRequest, draw: int) -> int:
        started_at = steady_time()
        at = self.tree.attach(request)
        suffix_ids = await self._encode(at, request)
        prompt_ids = self.tree.prompt_ids(at.parent, suffix_ids)
        params = self._fit(prompt_ids.size)
        completion = await self._sample(prompt_ids, params, draw)
        # Nothing is awaited from here: what was sampled is recorded.
        parsed = self._policy.renderer.parse(completion.token_ids, request.tools.schemas)
        turn = Turn(
            parent=at.parent,
            context_ids=suffix_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            weights_versions=completion.weights_versions,
            finish_reason=completion.finish_reason,
            sampling=params,
            is_delivered=False,
            malformed_calls=parsed.malformed_calls,
            called_tools=tuple(call.name for call in parsed.message.tool_calls),
            started_at=started_at,
            finished_at=steady_time(),
        )
        self.counters["malformed_calls"] += parsed.malformed_calls
        self._note_signs(parsed, request, at)
        return self.tree.record(turn, self._reply(parsed), request, at.num_matched)

    def _note_signs(self, parsed: ParsedReply, request: TurnRequest, at: Attachment) -> None:
        """Count, once a turn, each sign of reward hacking in its calls and in the outputs that it answers."""
        new = (read.message for read in request.messages[at.num_matched :])
        outputs = (message.content for message in new if message.role is Role.TOOL)
        for sign in call_signs(parsed.message.tool_calls) | output_signs(outputs):
            self.counters[f"hack_{sign}"] += 1

    def _reply(self, parsed: ParsedReply) -> Reply:
        """Name the calls; the ids are unique in the session, and the same when a run is repeated."""
        index = len(self.tree)
        calls = tuple(
            replace(call, id=f"call_{index}_{i}") for i, call in enumerate(parsed.message.tool_calls)
        )
        message = replace(parsed.message, tool_calls=calls)
        return Reply(message=message, canonical=canonical_reply(message))

    async def _encode(self, at: Attachment, request: TurnRequest) -> TokenIds:
        new = tuple(read.message for read in request.messages[at.num_matched :])
        num_chars = sum(len(message.content) for message in new)
        try:
            if num_chars > _THREAD_CHARS:
                return await asyncio.to_thread(self._render, at, new, request)
            return self._render(at, new, request)
        except TemplateError as error:
            raise bad_request(f"the chat template refuses these messages: {error}", "messages") from error

    def _render(self, at: Attachment, new: tuple[Message, ...], request: TurnRequest) -> TokenIds:
        renderer = self._policy.renderer
        if at.parent is None:
            return renderer.render_prompt(new, request.tools.schemas)
        return renderer.render_suffix(self.tree.last_id(at.parent), new, request.tools.schemas)

    def _fit(self, prompt_tokens: int) -> SamplingParams:
        """Return the recipe's parameters, with max_tokens clamped to what the window leaves."""
        room = self._policy.sampler.max_context_tokens - prompt_tokens
        if room < 1:
            raise self._overflow(prompt_tokens)
        own = self.spec.sampling
        return own if own.max_tokens <= room else replace(own, max_tokens=room)

    async def _sample(self, prompt_ids: TokenIds, params: SamplingParams, draw: int) -> Completion:
        sample = partial(
            self._policy.sampler.sample,
            prompt_ids,
            params,
            session_id=self.spec.rollout_id,
            turn_index=draw,
        )
        try:
            return await sample_patiently(sample, self._policy.patience)
        except ContextExceededError as error:
            raise self._overflow(prompt_ids.size) from error
        except SamplerError as error:
            self._sampler_failure = str(error)
            raise

    def _overflow(self, prompt_tokens: int) -> Refusal:
        self._is_context_exceeded = True
        return context_exceeded(self._policy.sampler.max_context_tokens, prompt_tokens)
