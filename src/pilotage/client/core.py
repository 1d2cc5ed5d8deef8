"""An engine behind the strict core of a training service.

Every call has an id of its own, and every call that changes the trainer a number, so that any request may be
repeated until it has its reply: it is carried out once. Sequenced calls go out one at a time; after one that
failed, the number is asked for again, because whether the failed one used its number up is the server's
knowledge.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from pilotage.client.http import JSON, Call, Http, Reply
from pilotage.client.jobs import Jobs
from pilotage.client.lease import leased
from pilotage.client.paths import segment
from pilotage.client.pieces import joined_results, pieces
from pilotage.client.remote_checkpoint import RemoteCheckpoint, new_id
from pilotage.errors import (
    ConfigError,
    ContextExceededError,
    JobFailedError,
    PilotageError,
    RequestFailedError,
    SamplerError,
    ServiceError,
    TrainerError,
    WeightsChangingError,
)
from pilotage.types import (
    AdamParams,
    Completion,
    Denominators,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Sample,
    SamplingParams,
    StepResult,
    TokenIds,
)
from pilotage.wire.core import (
    OCTET_STREAM,
    Capabilities,
    CheckpointRecord,
    CoreState,
    ErrorCode,
    LoadBody,
    PublishResult,
    SaveBody,
)
from pilotage.wire.frames import decode_frame, encode_frame
from pilotage.wire.records import record_from_json, record_to_json, unpack_result
from pilotage.wire.samples import (
    pack_forward_request,
    pack_sample_request,
    pack_samples,
    unpack_completion,
    unpack_logprobs,
)

_SILENCE_S = 60.0
"""Added to a long poll: longest time without a byte before the connection counts as dead."""
_EXPLAIN_S = 5.0
"""Longest that the server is asked why a job has ended."""
_FRAME_SLACK_BYTES = 2**16
_FRAME_VERBS = frozenset({"forward_backward", "forward", "sample"})


class CoreEngine:
    """Implements `Engine` for a running job. `attach` makes one."""

    def __init__(
        self,
        http: Http,
        job_id: str,
        *,
        capabilities: Capabilities,
        state: CoreState,
        stop_token_ids: tuple[int, ...],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._http = http
        self._jobs = Jobs(http)
        self._job_id = job_id
        self._path = f"/{segment(job_id)}/core"
        self._capabilities = capabilities
        self._max_context_tokens = state.max_context_tokens
        self._weights_version = state.weights_version
        self._next_sequence: int | None = state.next_sequence
        self._may_hold_part = state.next_sequence > 1  # a driver before this one may have died in a batch
        self._order = asyncio.Lock()  # numbers go out one at a time, so that a failed call leaves no hole
        self._stop_token_ids = stop_token_ids
        self._tasks = tasks
        self._scopes: set[asyncio.Timeout] = set()
        self._ended: str | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def attach(
        cls,
        http: Http,
        job_id: str,
        *,
        capabilities: Capabilities,
        stop_token_ids: tuple[int, ...],
        lease_s: float | None,
    ) -> "AsyncGenerator[CoreEngine]":
        """Use a running job while the context is open; the job itself stays.

        Args:
            stop_token_ids: those that the job was created with.
            lease_s: renewed meanwhile; None is a job without a lease.

        Raises:
            ServiceError: the job does not run, or cannot be reached.
        """
        call = Call(method="GET", path=f"/{segment(job_id)}/core", is_repeatable=True)
        state = await http.call(call, lambda reply: CoreState.model_validate(reply.json()))
        async with leased(http, job_id, lease_s=lease_s) as lease:
            engine = cls(
                http,
                job_id,
                capabilities=capabilities,
                state=state,
                stop_token_ids=stop_token_ids,
                tasks=lease.tasks,
            )
            lease.on_ended = engine._on_ended
            try:
                yield engine
            finally:
                await engine.close()

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._max_context_tokens

    @property
    def weights_version(self) -> int:
        """Version of the weights that the sampler uses, as of the last publish."""
        return self._weights_version

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return self._stop_token_ids

    # --- sampler ---

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`."""
        frame = encode_frame(
            pack_sample_request(prompt_ids, params, session_id=session_id, turn_index=turn_index)
        )
        operation_id = uuid.uuid4().hex
        try:
            return await self._operate("sample", frame, _completion, operation_id=operation_id)
        except asyncio.CancelledError:
            self._tasks.create_task(self._jobs.cancel_request(self._job_id, operation_id, is_repeatable=True))
            raise
        except ServiceError as error:
            raise _sampler_error(error) from error

    # --- trainer ---

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """See `Trainer`. A batch over the server's cap goes in pieces, whose gradients it adds up.

        Raises:
            TrainerError: a piece failed. What the earlier ones added is discarded before the next gradient
                or step, because now the service may be out of reach.
        """
        await self._discard_part()
        whole = denominators or Denominators.of(samples)
        parts: list[tuple[list[Sample], ForwardBackwardResult]] = []
        self._may_hold_part = True
        for indexes in pieces(samples, max_bytes=self._max_frame_bytes):
            piece = [samples[index] for index in indexes]
            frame = self._frame(encode_frame(pack_samples(piece, loss, whole)))
            parts.append((piece, await self._train("forward_backward", frame, _result)))
        self._may_hold_part = False
        return joined_results(samples, parts)

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """See `Trainer`. Split so that neither a request nor a reply is over the server's caps."""
        found: dict[int, Logprobs] = {}
        max_bytes = min(self._max_frame_bytes, self._capabilities.max_response_bytes - _FRAME_SLACK_BYTES)
        for indexes in pieces(samples, max_bytes=max_bytes):
            piece = [samples[index] for index in indexes]
            frame = self._frame(encode_frame(pack_forward_request(piece, temperature=temperature)))
            try:
                logprobs = await self._operate("forward", frame, _logprobs)
            except ServiceError as error:
                raise _trainer_error(error) from error
            found |= zip(indexes, logprobs, strict=True)
        return [found[index] for index in range(len(samples))]

    async def step(self, params: AdamParams) -> StepResult:
        """See `Trainer`."""
        await self._discard_part()
        return await self._train(
            "step", record_to_json(params), lambda reply: record_from_json(StepResult, reply.content)
        )

    async def discard(self) -> None:
        """See `Trainer`."""
        await self._train("discard", b"{}", lambda reply: None)
        self._may_hold_part = False

    async def _discard_part(self) -> None:
        """Drop what a batch left that was not added whole."""
        if self._may_hold_part:
            await self.discard()

    async def publish(self) -> int:
        """See `Trainer`."""
        result = await self._train("publish", b"{}", lambda reply: PublishResult.model_validate(reply.json()))
        self._weights_version = result.weights_version
        return result.weights_version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """Keep a checkpoint in the service, and write its name into a new directory."""
        body = SaveBody(checkpoint_id=new_id(directory), weights_only=weights_only)
        record = await self._train("save", body.model_dump_json().encode(), _record)
        RemoteCheckpoint(job_id=self._job_id, record=record).write(directory)

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restore the checkpoint that `save` named in `directory`, also one of another job.

        Raises:
            ConfigError: the directory names none.
            TrainerError: it is gone, or is not the one that was saved.
        """
        wanted = RemoteCheckpoint.read(directory)
        source = None if wanted.job_id == self._job_id else wanted.job_id
        body = LoadBody(
            checkpoint_id=wanted.record.checkpoint_id, source_job_id=source, weights_only=weights_only
        )
        loaded = await self._train("load", body.model_dump_json(exclude_none=True).encode(), _record)
        self._may_hold_part = False  # a load drops gradients
        if loaded.sha256 != wanted.record.sha256:
            raise TrainerError(
                f"checkpoint {loaded.checkpoint_id} of job {wanted.job_id} has digest {loaded.sha256}, but"
                f" {directory} was saved with {wanted.record.sha256}; it was changed in the service"
            )

    async def close(self) -> None:
        """Let go of the job, which stays; calls that wait fail."""
        self._on_ended("this driver let go of it")

    # --- calls ---

    @property
    def _max_frame_bytes(self) -> int:
        return self._capabilities.max_request_bytes - _FRAME_SLACK_BYTES

    def _frame(self, frame: bytes) -> bytes:
        """Return the frame if it may be sent.

        Raises:
            ConfigError: one rollout alone is over the server's cap.
        """
        if len(frame) > self._capabilities.max_request_bytes:
            raise ConfigError(
                f"one rollout makes a request of {len(frame)} bytes, and the service takes"
                f" {self._capabilities.max_request_bytes}; lower the rollout's turns or context"
            )
        return frame

    async def _train[T](self, verb: str, content: bytes, decode: Callable[[Reply], T]) -> T:
        """Carry out one sequenced call.

        Raises:
            TrainerError: the trainer refused or failed it.
            ServiceError: the job is gone, or nothing is known about the call.
        """
        async with self._order:
            sequence = self._next_sequence or await self._ask_sequence()
            self._next_sequence = None
            try:
                result = await self._operate(verb, content, decode, sequence=sequence)
            except ServiceError as error:
                raise _trainer_error(error) from error
            self._next_sequence = sequence + 1
            return result

    async def _ask_sequence(self) -> int:
        call = Call(method="GET", path=self._path, is_repeatable=True)
        return (await self._send(call, lambda reply: CoreState.model_validate(reply.json()))).next_sequence

    async def _operate[T](
        self,
        verb: str,
        content: bytes,
        decode: Callable[[Reply], T],
        *,
        operation_id: str | None = None,
        sequence: int | None = None,
    ) -> T:
        """Start an operation and wait for its outcome, through any number of lost requests and replies."""
        operation_id = operation_id or uuid.uuid4().hex
        wait_s = self._capabilities.max_wait_s
        query = {"operation_id": operation_id, "wait_s": f"{wait_s:g}"}
        if sequence is not None:
            query["sequence"] = str(sequence)
        call = Call(
            method="POST",
            path=f"{self._path}/{verb}",
            query=query,
            content=content,
            content_type=OCTET_STREAM if verb in _FRAME_VERBS else JSON,
            is_repeatable=True,
            timeout_s=wait_s + _SILENCE_S,
        )
        outcome = await self._send(call, _outcome(decode))
        poll = Call(
            method="GET",
            path=f"{self._path}/operations/{operation_id}",
            query={"wait_s": f"{wait_s:g}"},
            is_repeatable=True,
            timeout_s=wait_s + _SILENCE_S,
        )
        while outcome is None:
            outcome = await self._send(poll, _outcome(decode))
        return outcome[0]

    async def _send[T](self, call: Call, decode: Callable[[Reply], T]) -> T:
        """Send one call; it fails when the job has ended, even where the network says nothing."""
        if self._ended is not None:
            raise await self._failure()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                return await self._http.call(call, decode)
        except TimeoutError:
            if not scope.expired():
                raise
            raise await self._failure() from None
        except ServiceError as error:
            if error.code in (ErrorCode.ENGINE_LOST, ErrorCode.JOB_NOT_RUNNING):
                raise await self._failure(error) from error
            raise
        finally:
            self._scopes.discard(scope)

    def _on_ended(self, what: str) -> None:
        """Fail every call that waits, and those to come."""
        if self._ended is None:
            self._ended = what
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)

    async def _failure(self, error: ServiceError | None = None) -> JobFailedError:
        """Return why the job cannot be used any more: its reason, and the end of its log."""
        try:
            async with asyncio.timeout(_EXPLAIN_S):
                job = await self._jobs.get(self._job_id)
                if job.is_ended:
                    return await self._jobs.failure(job)
        except (ServiceError, TimeoutError):
            pass
        failure = JobFailedError(str(error) if error else f"job {self._job_id}: {self._ended}")
        failure.log_tail = error.log_tail if error else ()
        return failure


def _outcome[T](decode: Callable[[Reply], T]) -> Callable[[Reply], tuple[T] | None]:
    """Read a reply that is an outcome, or (202) says that there is none yet."""
    return lambda reply: None if reply.status == 202 else (decode(reply),)


def _completion(reply: Reply) -> Completion:
    return unpack_completion(decode_frame(reply.content))


def _result(reply: Reply) -> ForwardBackwardResult:
    return unpack_result(decode_frame(reply.content))


def _logprobs(reply: Reply) -> list[Logprobs]:
    return unpack_logprobs(decode_frame(reply.content))


def _record(reply: Reply) -> CheckpointRecord:
    return CheckpointRecord.model_validate_json(reply.content)


def _sampler_error(error: ServiceError) -> SamplerError:
    """Return the sampler's error that a service error stands for."""
    if error.code == ErrorCode.CONTEXT_EXCEEDED:
        return ContextExceededError(str(error))
    if error.code == ErrorCode.WEIGHTS_CHANGING:
        changing = WeightsChangingError(str(error))
        changing.retry_after_s = error.retry_after_s or WeightsChangingError.retry_after_s
        return changing
    failed = SamplerError(str(error))
    failed.retryable = isinstance(error, RequestFailedError) and error.code in (None, ErrorCode.SAMPLER_ERROR)
    return failed


def _trainer_error(error: ServiceError) -> PilotageError:
    """Return the trainer's error that a service error stands for; a lost job stays what it is."""
    if error.code in (ErrorCode.TRAINER_ERROR, ErrorCode.INVALID, ErrorCode.NOT_FOUND):
        return TrainerError(str(error))
    return error
