"""Which calls an engine executes, in which order, and what became of them.

Invariant: the work of an operation id runs at most once, and every caller who names the id with the same
bytes gets its one outcome. Sequenced operations run one at a time in the order of their numbers, whatever
order they arrive in; a number is used by one id only. This is what makes a repeated call safe.

Outcomes of sequenced operations are kept while the engine lives (they are small). Those of free ones, whose
effect nobody depends on, are kept until `_KEPT_BYTES` or `_KEPT_S` is reached, oldest first.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from pilotage.clock import steady_time
from pilotage.errors import PilotageError
from pilotage.service.refusals import Refusal, error_body
from pilotage.wire.core import OCTET_STREAM, ErrorBody, ErrorCode

_KEPT_BYTES = 256 * 2**20
_KEPT_S = 300.0
"""Five times as long as our client keeps asking for an outcome that does not come."""
_OVERHEAD_BYTES = 4096
"""What an operation takes besides the content of its reply, measured generously."""
_MAX_AHEAD = 64
"""Sequenced calls that may wait for an earlier number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an operation answers."""

    content: bytes
    media_type: str = "application/json"
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures for the job's metric series."""

    @property
    def is_frame(self) -> bool:
        """Whether the content is a DSSST1 frame."""
        return self.media_type == OCTET_STREAM


type Work = Callable[[], Awaitable[Reply]]


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One call by its id."""

    id: str
    verb: str
    digest: bytes
    sequence: int | None
    created_at: float
    status: str = "waiting"
    """waiting, running, done, failed or cancelled."""
    reply: Reply | None = None
    error: ErrorBody | None = None
    ended_at: float | None = None
    work_s: float | None = None
    """How long its work ran, without the time that it waited for its turn."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self.ended.is_set()

    async def wait(self, wait_s: float) -> bool:
        """Wait for the outcome, at most `wait_s`; returns whether there is one."""
        if wait_s > 0 and not self.has_ended:
            try:
                async with asyncio.timeout(wait_s):
                    await self.ended.wait()
            except TimeoutError:
                return False
        return self.has_ended


def digest_of(verb: str, body: bytes) -> bytes:
    """Return what tells one call from another under the same id."""
    return sha256(verb.encode() + b"\0" + body).digest()


class Operations:
    """The ledger of one engine; used from one event loop."""

    def __init__(self, *, on_end: Callable[[Operation], None] = lambda operation: None) -> None:
        """Args:
        on_end: told of every operation that has an outcome.
        """
        self._on_end = on_end
        self._by_id: dict[str, Operation] = {}
        self._free_outcomes: deque[Operation] = deque()
        """Free operations that have ended, oldest first: those that may be forgotten."""
        self._waiting: dict[int, tuple[Operation, Work]] = {}
        self._kept_bytes = 0
        self._last_taken = 0
        """Highest number that was handed out or given."""
        self._next_to_run = 1
        self._is_busy = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def next_sequence(self) -> int:
        """The number that the next sequenced call should have."""
        return self._last_taken + 1

    @property
    def num_in_flight(self) -> int:
        """Operations without an outcome."""
        return len(self._tasks) + len(self._waiting)

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation of that id, or None where there is none (or it was forgotten)."""
        return self._by_id.get(operation_id)

    def submit_free(self, operation_id: str, verb: str, digest: bytes, work: Work) -> Operation:
        """Start an operation without an order, or return the one that has this id.

        Raises:
            Refusal: the id was used for other bytes.
        """
        known = self._known(operation_id, digest, sequence=None)
        if known is not None:
            return known
        operation = self._add(operation_id, verb, digest, None)
        self._start(operation, work)
        return operation

    def submit_sequenced(
        self, operation_id: str, sequence: int | None, verb: str, digest: bytes, work: Work
    ) -> Operation:
        """Queue an operation at its number, or return the one that has this id.

        Args:
            sequence: None takes the next number.

        Raises:
            Refusal: the id or the number was used for other bytes, or the number is too far ahead.
        """
        known = self._known(operation_id, digest, sequence=sequence)
        if known is not None:
            return known
        number = self.next_sequence if sequence is None else sequence
        if number in self._waiting or number < self._next_to_run + self._is_busy:
            raise Refusal(
                ErrorCode.CONFLICT,
                f"sequence {number} was used by another operation; the next number is {self.next_sequence}."
                " Two drivers, or a driver that has lost count, are using this job",
            )
        if number > self._next_to_run + _MAX_AHEAD:
            raise Refusal(
                ErrorCode.CONFLICT,
                f"sequence {number} is too far ahead of {self._next_to_run}, which has not arrived",
            )
        operation = self._add(operation_id, verb, digest, number)
        self._last_taken = max(self._last_taken, number)
        self._waiting[number] = (operation, work)
        self._run_next()
        return operation

    def cancel(self, operation_id: str) -> bool:
        """Cancel a free operation that runs; returns whether there was one."""
        operation = self._by_id.get(operation_id)
        if operation is None or operation.has_ended or operation.sequence is not None:
            return False
        assert operation._task is not None
        operation._task.cancel()
        return True

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self, operation_id: str, digest: bytes, *, sequence: int | None) -> Operation | None:
        operation = self._by_id.get(operation_id)
        if operation is None:
            return None
        is_same = operation.digest == digest
        if not is_same or (sequence is not None and operation.sequence != sequence):
            raise Refusal(
                ErrorCode.CONFLICT,
                f"operation {operation_id} was used for another {operation.verb} call"
                f" (sequence {operation.sequence}); every call needs an id of its own",
            )
        return operation

    def _add(self, operation_id: str, verb: str, digest: bytes, sequence: int | None) -> Operation:
        operation = Operation(
            id=operation_id,
            verb=verb,
            digest=digest,
            sequence=sequence,
            created_at=steady_time(),
        )
        self._by_id[operation_id] = operation
        return operation

    def _run_next(self) -> None:
        if self._is_busy or self._next_to_run not in self._waiting:
            return
        operation, work = self._waiting.pop(self._next_to_run)
        self._is_busy = True
        self._start(operation, work)

    def _start(self, operation: Operation, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._run(operation, work))
        operation._task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, operation: Operation, work: Work) -> None:
        operation.status = "running"
        started_at = time.perf_counter()
        try:
            operation.reply = await work()
            operation.status = "done"
        except asyncio.CancelledError:
            operation.status = "cancelled"
            operation.error = ErrorBody(code=ErrorCode.CONFLICT, message="the operation was cancelled")
        except Refusal as refusal:
            operation.status, operation.error = "failed", refusal.body
        except PilotageError as error:
            operation.status, operation.error = "failed", error_body(error)
        except Exception as error:  # noqa: BLE001 - the boundary: a broken engine is this operation's outcome
            operation.status = "failed"
            operation.error = ErrorBody(
                code=ErrorCode.SAMPLER_ERROR if operation.sequence is None else ErrorCode.TRAINER_ERROR,
                message=f"{type(error).__name__}: {error}",
            )
        finally:
            operation.work_s = time.perf_counter() - started_at
            self._end(operation)

    def _end(self, operation: Operation) -> None:
        operation.ended_at = steady_time()
        operation._task = None  # a task keeps its context and its coroutine alive
        if operation.sequence is not None:
            self._next_to_run, self._is_busy = operation.sequence + 1, False
        operation.ended.set()
        if operation.sequence is None:
            self._free_outcomes.append(operation)
            self._kept_bytes += _size(operation)
        self._on_end(operation)
        self._forget_old()
        self._run_next()

    def _forget_old(self) -> None:
        """Drop outcomes of free operations, oldest first, down to the bounds."""
        oldest_kept = steady_time() - _KEPT_S
        outcomes = self._free_outcomes
        while outcomes and (self._kept_bytes > _KEPT_BYTES or (outcomes[0].ended_at or 0) < oldest_kept):
            operation = outcomes.popleft()
            self._kept_bytes -= _size(operation)
            del self._by_id[operation.id]


def _size(operation: Operation) -> int:
    return _OVERHEAD_BYTES + (0 if operation.reply is None else len(operation.reply.content))
