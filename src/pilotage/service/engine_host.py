"""One job's engine and everything that is said about it: operations, checkpoints, metrics.

Lives in the engine process. The engine is opened in the background, so that the front can ask how far it is.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from pilotage.clock import steady_time
from pilotage.errors import ConfigError
from pilotage.interfaces import Engine
from pilotage.rendering import TokenizerFile
from pilotage.service.checkpoints import Checkpoints
from pilotage.service.operations import Operation, Operations, Reply, Work, digest_of
from pilotage.service.refusals import Refusal
from pilotage.types import (
    AdamParams,
    Denominators,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Sample,
    StepResult,
    TokenIds,
)
from pilotage.wire.core import CheckpointRecord, CoreState, ErrorCode, LoadBody, PublishResult, SaveBody
from pilotage.wire.jobs import CreateJobBody
from pilotage.wire.samples import scored_sample

_LOG = logging.getLogger(__name__)
_INLINE_DIGEST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What an engine process is started with: `job.json` in the job's directory."""

    job_id: str
    body: CreateJobBody
    model_dir: Path
    source_checkpoint: Path | None
    """Files to load once the engine is open."""
    directory: Path
    """The job's own: checkpoints/, logs/, metrics.jsonl."""
    socket: Path

    def write(self) -> Path:
        """Write the spec into the job's directory; returns the file."""
        path = self.directory / "job.json"
        content = {
            "job_id": self.job_id,
            "body": self.body.model_dump(mode="json", by_alias=True),
            "model_dir": str(self.model_dir),
            "source_checkpoint": None if self.source_checkpoint is None else str(self.source_checkpoint),
            "socket": str(self.socket),
        }
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, directory: Path) -> "JobSpec":
        """Read what `write` wrote."""
        content: dict[str, Any] = json.loads((directory / "job.json").read_bytes())
        source = content["source_checkpoint"]
        return cls(
            job_id=content["job_id"],
            body=CreateJobBody.model_validate(content["body"]),
            model_dir=Path(content["model_dir"]),
            source_checkpoint=None if source is None else Path(source),
            directory=directory,
            socket=Path(content["socket"]),
        )


type OpenEngine = Callable[[JobSpec], Awaitable[Engine]]


class EngineHost:
    """Opens the engine and runs its operations."""

    def __init__(self, spec: JobSpec, open_engine: OpenEngine) -> None:
        self.spec = spec
        self.operations = Operations(on_end=self._record)
        self.checkpoints = Checkpoints(spec.directory / "checkpoints")
        self.failure: str | None = None
        """Why the engine could not be opened."""
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self.global_steps = 0
        """Optimizer steps behind the weights."""
        self._metrics = spec.directory / "metrics.jsonl"
        self.asked = asyncio.Event()
        """Set whenever a front asks how the engine is."""

    # --- life ---

    async def open(self) -> None:
        """Open the engine and load the checkpoint that the job starts from; failures are kept as text."""
        try:
            engine = await self._open_engine(self.spec)
            if self.spec.source_checkpoint is not None:
                config = self.spec.body.training_config
                keeps = config is None or config.load_optimizer_states
                await engine.load(self.spec.source_checkpoint, weights_only=not keeps)
                await engine.publish()
        except ConfigError as error:
            self.failure = str(error)
            _LOG.error("the engine cannot be opened: %s", error)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _LOG.exception("the engine cannot be opened")
            raise
        else:
            self._engine = engine
            _LOG.warning("job %s: the engine is open", self.spec.job_id)

    async def close(self) -> None:
        """Cancel operations and close the engine."""
        await self.operations.close()
        if self._engine is not None:
            await self._engine.close()

    @property
    def status(self) -> str:
        """loading, ready or failed."""
        if self.failure is not None:
            return "failed"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> Engine:
        """The open engine.

        Raises:
            Refusal: it is not open.
        """
        if self._engine is None:
            raise Refusal(ErrorCode.JOB_NOT_RUNNING, f"the engine is {self.status}", retryable=True)
        return self._engine

    @property
    def state(self) -> CoreState:
        """Where the engine stands."""
        return CoreState(
            next_sequence=self.operations.next_sequence,
            weights_version=self.engine.weights_version,
            max_context_tokens=self.engine.max_context_tokens,
        )

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return tuple(self.engine.stop_token_ids)

    @cached_property
    def tokenizer(self) -> TokenizerFile:
        """The model's tokenizer, for prompts that come as text."""
        return TokenizerFile.load(self.spec.model_dir)

    @property
    def adam_defaults(self) -> AdamParams:
        """What a step uses where the call does not say."""
        config = self.spec.body.training_config
        if config is None:
            raise Refusal(ErrorCode.CONFLICT, "the job has no training sub-job")
        return AdamParams(
            learning_rate=config.optimizer.lr,
            beta1=config.optimizer.betas[0],
            beta2=config.optimizer.betas[1],
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.gradient_clipping,
        )

    # --- operations ---

    async def submit(
        self,
        verb: str,
        work: Work,
        *,
        operation_id: str,
        body: bytes,
        is_sequenced: bool,
        sequence: int | None,
    ) -> Operation:
        """Hand an operation to the ledger.

        Raises:
            Refusal: the engine is not open, or the ledger refuses.
        """
        _ = self.engine
        if len(body) > _INLINE_DIGEST_BYTES:
            digest = await asyncio.to_thread(digest_of, verb, body)
        else:
            digest = digest_of(verb, body)
        if is_sequenced:
            self.require_trainer()
            return self.operations.submit_sequenced(operation_id, sequence, verb, digest, work)
        return self.operations.submit_free(operation_id, verb, digest, work)

    def require_trainer(self) -> None:
        """Refuse where the job has no trainer."""
        _ = self.adam_defaults

    async def forward_backward(
        self, samples: list[Sample], loss: LossConfig, denominators: Denominators | None
    ) -> ForwardBackwardResult:
        """Check lengths, and add a gradient."""
        longest = max((sample.token_ids.size for sample in samples), default=0)
        if longest > self.engine.max_context_tokens:
            raise Refusal(
                ErrorCode.INVALID,
                f"a sample has {longest} tokens, the trainer takes {self.engine.max_context_tokens}",
                path="lengths",
            )
        return await self.engine.forward_backward(samples, loss, denominators=denominators)

    async def step(self, params: AdamParams) -> StepResult:
        """Apply the gradient."""
        result = await self.engine.step(params)
        self.global_steps += 1
        return result

    async def prompt_logprobs(self, prompt_ids: TokenIds, *, temperature: float) -> Logprobs:
        """Return [n] what the trainer's weights give to each token of a prompt; the first has none."""
        sample = scored_sample(prompt_ids.copy(), np.arange(prompt_ids.size) > 0, name="prompt")
        (logprobs,) = await self.engine.forward([sample], temperature=temperature)
        return logprobs

    async def publish(self) -> PublishResult:
        """Give the sampler the trainer's weights."""
        return PublishResult(weights_version=await self.engine.publish())

    async def save(self, body: SaveBody) -> CheckpointRecord:
        """Write a checkpoint; one that exists under this id is an error."""
        path = self.checkpoints.path_of(body.checkpoint_id)
        self.checkpoints.discard_incomplete(body.checkpoint_id)
        await self.engine.save(path, weights_only=body.weights_only)
        return await asyncio.to_thread(
            self.checkpoints.add,
            body.checkpoint_id,
            is_weights_only=body.weights_only,
            global_steps=self.global_steps,
            weights_version=self.engine.weights_version,
        )

    async def load(self, body: LoadBody, source: Path) -> CheckpointRecord:
        """Restore a checkpoint.

        Args:
            source: the directory of the job that wrote it; the front has checked that it may be read.
        """
        checkpoints = Checkpoints(source / "checkpoints")
        record = checkpoints.get(body.checkpoint_id)
        path = checkpoints.path_of(body.checkpoint_id)
        await self.engine.load(path, weights_only=body.weights_only)
        self.global_steps = record.global_steps
        return record

    # --- metrics ---

    def _record(self, operation: Operation) -> None:
        """Append a finished operation of the trainer to the job's series."""
        if operation.sequence is None:
            return
        ended_at = operation.ended_at or steady_time()
        line: Mapping[str, Any] = {
            "at": ended_at,
            "verb": operation.verb,
            "status": operation.status,
            "duration_s": ended_at - operation.created_at,
            "values": {} if operation.reply is None else operation.reply.values,
        }
        with self._metrics.open("ab") as file:
            file.write(to_json(line, inf_nan_mode="strings") + b"\n")


def json_reply(text: str) -> Reply:
    """Return a reply of JSON text."""
    return Reply(content=text.encode())


def figures(result: ForwardBackwardResult | StepResult) -> dict[str, float]:
    """Return the numbers of a result; what was not measured is absent."""
    values = {each.name: getattr(result, each.name) for each in fields(result)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
