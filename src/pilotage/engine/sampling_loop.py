"""The sampling thread: continuous batching over one decoder.

    submit -> waiting -> prefilling -> active (a row of the batch) -> future resolved
                ^                         |
                +------ weights change ---+

Each round admits what fits, computes at most `prefill_tokens` of contexts, and decodes one token in every
active row, so requests join and leave between tokens. Callers put requests and commands (any thread);
this thread alone takes them. Nothing bounds the number of waiting requests but the number of callers,
each of which waits for its own answer.

A command runs between rounds with no row active. Requests that were under way go on afterwards from what they
have sampled: their contexts are computed again, so after a change of weights no key of the old ones is read.

Whatever ends this thread fails every pending and every later call: nobody waits for a dead thread.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pilotage.engine.decoder import Decoder
from pilotage.engine.draws import RowSettings, choose, draw_key, uniforms
from pilotage.engine.kv_cache import Lease
from pilotage.errors import ContextExceededError, SamplerError
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """One call, from submission to answer."""

    prompt_ids: TokenIds
    params: SamplingParams
    key: int
    max_tokens: int
    future: Future[Completion] = field(default_factory=Future[Completion])
    lease: Lease | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    weights_versions: list[int] = field(default_factory=list[int])

    def sequence(self) -> TokenIds:
        """Return prompt and what was sampled so far."""
        return np.concatenate([self.prompt_ids, np.array(self.token_ids, np.int32)])


class SamplingLoop:
    """Owns a decoder and the thread that drives it."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        prefill_tokens: int = 512,
    ) -> None:
        self.max_context_tokens = max_context_tokens
        self.weights_version = 0
        self._decoder = decoder
        self.stop_token_ids = stop_token_ids
        self._stops = frozenset(stop_token_ids)
        self._prefill_tokens = prefill_tokens
        self._wake = threading.Condition()
        self._inbox: deque[_Request] = deque()
        self._commands: deque[tuple[Callable[[Decoder], None], Future[None]]] = deque()
        self._failure: SamplerError | None = None
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []
        self._active: list[_Request] = []
        self._batch: _Batch | None = None
        self._thread = threading.Thread(target=self._run, name="pilotage-sampler", daemon=True)
        self._thread.start()

    def submit(self, prompt_ids: TokenIds, params: SamplingParams, *, turn_index: int) -> Future[Completion]:
        """Queue a request; cancelling the future takes it out and frees its row.

        Raises:
            ContextExceededError: no room for one token.
            SamplerError: the prompt is empty or holds an id outside the vocabulary, or the thread is dead.
        """
        room = self.max_context_tokens - prompt_ids.size
        if room < 1:
            raise ContextExceededError(
                f"the prompt has {prompt_ids.size} tokens and the context window {self.max_context_tokens};"
                " a completion needs room for one more"
            )
        vocab_size = self._decoder.vocab_size
        if prompt_ids.size == 0 or prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size:
            raise _lasting(
                f"a prompt must be one or more ids in [0, {vocab_size}), got {prompt_ids.size} ids"
                + (f" from {prompt_ids.min()} to {prompt_ids.max()}" if prompt_ids.size else "")
            )
        request = _Request(
            prompt_ids=prompt_ids,
            params=params,
            key=draw_key(params.seed, turn_index),
            max_tokens=min(params.max_tokens, room),
        )
        with self._wake:
            if self._failure is not None:
                raise self._failure
            self._inbox.append(request)
            self._wake.notify()
        return request.future

    def between_rounds(self, command: Callable[[Decoder], None]) -> Future[None]:
        """Run `command` on the sampling thread while no row is active; the future has its end or error."""
        future: Future[None] = Future()
        with self._wake:
            if self._failure is not None:
                raise self._failure
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """End the thread, and fail what is pending. Closing twice is harmless."""
        with self._wake:
            self._failure = self._failure or _lasting("the engine was closed")
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        """Boundary: whatever happens in here is told to every caller."""
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                while self._take_work():
                    self._round()
        except Exception as error:  # noqa: BLE001 - the thread's only way to report; nothing goes on after it
            with self._wake:
                self._failure = _lasting(f"the sampling thread died: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
        self._fail_pending()

    def _take_work(self) -> bool:
        """Wait until there is something to do, and take it; False where the loop is to end."""
        with self._wake:
            while not (
                self._failure
                or self._inbox
                or self._commands
                or self._waiting
                or self._prefilling
                or self._active
            ):
                self._wake.wait()
            self._waiting += self._inbox
            self._inbox.clear()
            return self._failure is None

    def _round(self) -> None:
        """Admit, prefill, decode one token in every row."""
        self._drop_cancelled()
        self._run_commands()
        self._admit()
        if self._prefilling:
            leases = [request.lease for request in self._prefilling if request.lease is not None]
            self._decoder.prefill(leases, budget_tokens=self._prefill_tokens)
            self._enter_computed()
        if self._active:
            self._decode()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(request for request in self._waiting if not request.future.cancelled())
        for request in [request for request in self._prefilling if request.future.cancelled()]:
            assert request.lease is not None
            self._decoder.release(request.lease)
            self._prefilling.remove(request)
        for row in reversed(range(len(self._active))):
            if self._active[row].future.cancelled():
                self._leave(row)

    def _run_commands(self) -> None:
        while self._commands:
            self._suspend()
            command, future = self._commands.popleft()
            try:
                command(self._decoder)
            except Exception as error:  # noqa: BLE001 - the error belongs to whoever gave the command
                future.set_exception(error)
            else:
                future.set_result(None)

    def _suspend(self) -> None:
        """Put everything under way back in front of the queue."""
        suspended = [*self._active, *self._prefilling]
        for request in self._prefilling:
            assert request.lease is not None
            self._decoder.release(request.lease)
        for row in reversed(range(len(self._active))):
            self._leave(row)
        self._prefilling.clear()
        self._waiting.extendleft(reversed(suspended))

    def _admit(self) -> None:
        """Lease a slot for as many waiting requests as rows are left, oldest first."""
        later: deque[_Request] = deque()
        while self._waiting and len(self._active) + len(self._prefilling) < self._decoder.max_batch:
            request = self._waiting.popleft()
            request.lease = self._decoder.acquire(request.sequence()[:-1])
            if request.lease is None:
                later.append(request)
            else:
                self._prefilling.append(request)
        self._waiting.extendleft(reversed(later))

    def _enter_computed(self) -> None:
        for request in self._prefilling:
            assert request.lease is not None
            if request.lease.is_computed:
                self._decoder.enter(request.lease)
                self._active.append(request)
                self._batch = None
        self._prefilling = [request for request in self._prefilling if request not in self._active]

    def _decode(self) -> None:
        """Sample one token in every row, and answer those that are finished."""
        if self._batch is None:
            self._batch = _Batch.of(
                self._active, vocab_size=self._decoder.vocab_size, device=self._decoder.device
            )
        batch = self._batch
        logits_BV = self._decoder.decode(batch.last_ids_B)
        ids_B, logprobs_B = choose(logits_BV, batch.settings, uniforms(batch.keys_B, batch.counters_B))
        batch.last_ids_B = ids_B
        batch.counters_B += np.uint64(1)
        finished: list[int] = []
        for row, (request, token_id, logprob) in enumerate(
            zip(self._active, ids_B.tolist(), logprobs_B.tolist(), strict=True)
        ):
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            request.weights_versions.append(self.weights_version)
            if token_id in self._stops or len(request.token_ids) == request.max_tokens:
                finished.append(row)
        for row in reversed(finished):
            self._answer(self._leave(row))

    def _leave(self, row: int) -> _Request:
        """Take a row out, as the decoder does: the last row takes its place."""
        self._decoder.leave(row)
        request, last = self._active[row], self._active.pop()
        if request is not last:
            self._active[row] = last
        request.lease = None
        self._batch = None
        return request

    def _answer(self, request: _Request) -> None:
        is_stop = request.token_ids[-1] in self._stops
        completion = Completion(
            token_ids=np.array(request.token_ids, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            weights_versions=np.array(request.weights_versions, np.int32),
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
        )
        _resolve(request.future, completion)

    def _fail_pending(self) -> None:
        with self._wake:
            failure = self._failure
            assert failure is not None
            pending = [*self._inbox, *self._waiting, *self._prefilling, *self._active]
            commands = list(self._commands)
            self._inbox.clear()
            self._commands.clear()
        for request in pending:
            _resolve(request.future, failure)
        for _, future in commands:
            future.set_exception(failure)


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    """The rows of a decode step as arrays, kept while no row joins or leaves."""

    last_ids_B: NDArray[np.int64]
    keys_B: NDArray[np.uint64]
    counters_B: NDArray[np.uint64]
    settings: RowSettings

    @classmethod
    def of(cls, requests: list[_Request], *, vocab_size: int, device: torch.device) -> "_Batch":
        """Collect the rows."""
        last_ids = [
            request.token_ids[-1] if request.token_ids else request.prompt_ids[-1] for request in requests
        ]
        return cls(
            last_ids_B=np.array(last_ids, np.int64),
            keys_B=np.array([request.key for request in requests], np.uint64),
            counters_B=np.array([len(request.token_ids) for request in requests], np.uint64),
            settings=RowSettings.of(
                [request.params for request in requests], vocab_size=vocab_size, device=device
            ),
        )


def _lasting(message: str) -> SamplerError:
    """Make an error that asking again does not cure."""
    error = SamplerError(message)
    error.retryable = False
    return error


def _resolve(future: Future[Completion], outcome: Completion | SamplerError) -> None:
    """Answer, unless the caller has gone away in this instant."""
    try:
        if isinstance(outcome, SamplerError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        assert future.cancelled()
