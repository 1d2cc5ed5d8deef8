"""An engine behind the stock wire, for services without the strict core.

That wire has no operation ids, applies a step twice if it is sent twice, forgets the gradient of all but the
last forward_backward, and counts no weights. So this engine

- allows one forward_backward between two steps;
- never repeats `step`, `save`, `load`, `weight-sync` or `generate` after a reply was lost. Whether a lost
  step was applied is read off a checkpoint; where that says no, the run stops;
- counts weights itself;
- refuses at the start what the wire cannot honour (`check_plain`).
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotage.algorithms import WeightsVersions, logprob_gap
from pilotage.client.http import Call, Http, json_call
from pilotage.client.jobs import Jobs
from pilotage.client.lease import leased
from pilotage.client.paths import segment
from pilotage.client.remote_checkpoint import RemoteCheckpoint
from pilotage.client.stock_requests import StockRequests
from pilotage.errors import (
    ConfigError,
    ContextExceededError,
    InvalidBodyError,
    LostReplyError,
    PilotageError,
    SamplerError,
    ServiceError,
    TrainerError,
)
from pilotage.types import (
    AdamParams,
    Completion,
    Denominators,
    FinishReason,
    ForwardBackwardResult,
    Logprobs,
    LossConfig,
    Sample,
    SamplingParams,
    StepResult,
    TokenIds,
    token_ids,
)
from pilotage.wire.core import CheckpointRecord
from pilotage.wire.frames import encode_frame
from pilotage.wire.grpo_out import check_stock_loss, from_stock_rows, to_stock
from pilotage.wire.jobs import CreateJobBody, OptimizerConfig

_MAX_REPLY_BYTES = 128 * 2**20
_REQUEST_S = 3600.0


def check_plain(body: CreateJobBody, *, loss: LossConfig, adam: AdamParams, sampling: SamplingParams) -> None:
    """Refuse what the stock wire cannot honour.

    Raises:
        ConfigError: with the setting, and what to use instead.
    """
    try:
        check_stock_loss(loss)
    except InvalidBodyError as error:
        raise ConfigError(f"loss.{error}") from None
    if sampling.temperature != 1.0:
        raise ConfigError(
            f"sampling.temperature is {sampling.temperature}: log-probs of the stock wire are those of"
            " temperature 1; use 1.0, or a service with the strict core"
        )
    _check_adam(body, adam)


def _check_adam(body: CreateJobBody, adam: AdamParams) -> None:
    trainer = body.trainer
    if trainer is None or trainer.training_config is None:
        raise ConfigError("the job has no training sub-job")
    config: OptimizerConfig = trainer.training_config.optimizer
    fixed = {
        "beta1": (config.betas[0], adam.beta1),
        "beta2": (config.betas[1], adam.beta2),
        "eps": (config.eps, adam.eps),
        "weight_decay": (config.weight_decay, adam.weight_decay),
        "max_grad_norm": (trainer.training_config.gradient_clipping, adam.max_grad_norm),
    }
    for name, (created, wanted) in fixed.items():
        if created != wanted:
            raise ConfigError(
                f"optimizer.{name} is {created} in the job and {wanted} in the step; the stock wire fixes all"
                " but the learning rate when the job is created"
            )


class PlainEngine:
    """Implements `Engine` for a running job. `attach` makes one."""

    def __init__(self, http: Http, job_id: str, *, body: CreateJobBody, tasks: asyncio.TaskGroup) -> None:
        self._http = http
        self._jobs = Jobs(http)
        self._job_id = job_id
        self._requests = StockRequests(http, job_id, timeout_s=_REQUEST_S)
        self._body = body
        self._tasks = tasks
        self._versions = WeightsVersions()
        self._has_gradient = False
        self._global_steps = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def attach(cls, http: Http, job_id: str, *, body: CreateJobBody) -> "AsyncGenerator[PlainEngine]":
        """Use a running job while the context is open; the job itself stays."""
        async with leased(http, job_id, lease_s=None) as lease:
            yield cls(http, job_id, body=body, tasks=lease.tasks)

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._body.max_context_tokens

    @property
    def weights_version(self) -> int:
        """Version of the weights that the sampler uses, as counted here."""
        return self._versions.current

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion; every request states them."""
        return self._body.extras.engine.stop_token_ids or ()

    # --- sampler ---

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. At a temperature other than 1 (evaluation), log-probs are still those of 1."""
        room = self.max_context_tokens - int(prompt_ids.size)
        if room < 1:
            raise ContextExceededError(
                f"a prompt of {prompt_ids.size} tokens leaves no room in {self.max_context_tokens}"
            )
        version = self._versions.current
        wishes = {
            "prompts": [np.asarray(prompt_ids, np.int32)],
            "sampling_params": _stock_params(params, turn_index, room=room, stops=self.stop_token_ids),
            "routing_key": session_id,
            "strict": False,
        }
        call = Call(
            method="POST",
            path="/generate",
            content=encode_frame(wishes),
            content_type="application/octet-stream",
        )
        request_id = ""
        try:
            request_id = await self._requests.submit(call)
            return _completion(await self._requests.result(request_id), version)
        except asyncio.CancelledError:
            if request_id:
                self._tasks.create_task(
                    self._jobs.cancel_request(self._job_id, request_id, is_repeatable=False)
                )
            raise
        except ServiceError as error:
            raise SamplerError(str(error)) from error

    # --- trainer ---

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """See `Trainer`. One call holds the whole batch: a second one would replace its gradient.

        Raises:
            TrainerError: a gradient is there already, or the service failed; nothing is known of the
                gradient then.
        """
        if self._has_gradient:
            raise TrainerError(
                "the stock wire replaces a gradient by the next one; call step before the next"
                " forward_backward, or use a service with the strict core"
            )
        longest = max((sample.token_ids.size for sample in samples), default=0)
        wants_logprobs = len(samples) * longest * 4 * 4 // 3 < _MAX_REPLY_BYTES - 2**20  # in base64
        whole = denominators or Denominators.of(samples)
        try:
            tree = to_stock(samples, loss, whole, wants_logprobs=wants_logprobs)
        except InvalidBodyError as error:
            raise TrainerError(f"this batch cannot go over the stock wire: {error}") from None
        options = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
        frame = encode_frame(tree, op=options)
        request_id = await self._train(
            self._requests.submit_group("/forward-backward", frame, operation="fwd-bwd")
        )
        self._has_gradient = True
        result = await self._train(self._requests.result(request_id))
        return _measured(samples, loss, result)

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """Refuse: the stock wire has no forward that works.

        Raises:
            TrainerError: always.
        """
        raise TrainerError(
            f"the stock wire cannot score {len(samples)} samples at temperature {temperature}; use a service"
            " with the strict core, or kl_coef = 0"
        )

    async def step(self, params: AdamParams) -> StepResult:
        """See `Trainer`. All of `params` but the learning rate must be those of the job."""
        _check_adam(self._body, params)
        if not self._has_gradient:
            raise TrainerError("there is no gradient to apply; call forward_backward first")
        call = json_call("POST", "/step", {"learning_rate": params.learning_rate})
        try:
            request_id = await self._requests.submit(call)
        except LostReplyError as error:
            await self._prove_step(error)
            return self._stepped(params, {})
        except ServiceError as error:
            raise TrainerError(str(error)) from error
        return self._stepped(params, await self._train(self._requests.result(request_id)))

    def _stepped(self, params: AdamParams, result: Mapping[str, Any]) -> StepResult:
        steps = result.get("global_steps")
        self._global_steps = int(steps) if isinstance(steps, int | float) else self._global_steps + 1
        self._has_gradient = False
        self._versions.changed()
        metrics = result.get("metrics")
        norm = metrics.get("grad_norm") if isinstance(metrics, dict) else None
        return StepResult(
            grad_norm=float(norm) if isinstance(norm, int | float) else math.nan,
            learning_rate=params.learning_rate,
            num_backwards=1,
        )

    async def _prove_step(self, lost: LostReplyError) -> None:
        """Find out from a checkpoint whether a step whose reply was lost was applied.

        Raises:
            TrainerError: it was not, or not yet, or nothing can be said.
        """
        try:
            record = await self._saved(weights_only=True)
        except ServiceError as error:
            raise TrainerError(f"{lost}; whether the step was applied is unknown: {error}") from error
        steps = record.global_steps
        if record.checkpoint_id:
            path = self._path(f"/checkpoints/{segment(record.checkpoint_id)}")
            with contextlib.suppress(ServiceError):
                await self._http.call(Call(method="DELETE", path=path), lambda reply: None)
        if steps != self._global_steps + 1:
            raise TrainerError(
                f"{lost}; the service counts {steps} steps where {self._global_steps + 1} were expected, and"
                " a step is never sent twice: resume the run from its newest checkpoint"
            )

    async def discard(self) -> None:
        """See `Trainer`. The service itself keeps it until the next forward_backward replaces it."""
        self._has_gradient = False

    async def publish(self) -> int:
        """See `Trainer`; the prefix cache is dropped after the sync."""
        payload = {
            "source_sub_job_id": f"{self._job_id}:training:0",
            "target_sub_job_ids": [f"{self._job_id}:sampling:{i}" for i in range(self._num_samplers)],
            "weight_format": "hf" if self._body.adapter is None else "lora",
        }
        call = json_call("POST", "/operation", {"operation_type": "weight-sync", "payload": payload})
        await self._train(self._requests.result(await self._train(self._requests.submit(call))))
        drop = {"operation_type": "reset-prefix-cache", "payload": {"drain": True, "timeout_s": 60}}
        reset = json_call("POST", self._path("/operation"), drop, is_repeatable=True, timeout_s=120.0)
        await self._train(self._http.call(reset, lambda reply: None))
        version = self._versions.advance()
        self._versions.published()
        return version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """Keep a checkpoint in the service, and write its name into a new directory."""
        record = await self._train(self._saved(weights_only=weights_only))
        if not record.checkpoint_id:
            raise TrainerError("the service saved a checkpoint without telling its id; nothing can load it")
        RemoteCheckpoint(job_id=self._job_id, record=record, is_published=self._versions.is_published).write(
            directory
        )

    async def _saved(self, *, weights_only: bool) -> CheckpointRecord:
        """Save, and put together what the service says about it."""
        kind = "weights-only" if weights_only else "resumable"
        call = json_call("POST", "/save", {"checkpoint_type": kind})
        result = await self._requests.result(await self._requests.submit(call))
        found = re.search(r"cp_[0-9A-Za-z-]+", str(result.get("stage_path", "")))
        checkpoint_id = str(result.get("checkpoint_id") or (found.group() if found else ""))
        tag = re.search(r"global_step(\d+)", str(result.get("checkpoint_tag", "")))
        steps = result.get("global_steps", tag.group(1) if tag else -1)
        return CheckpointRecord(
            checkpoint_id=checkpoint_id,
            checkpoint_type=kind,
            global_steps=int(steps),
            weights_version=self._versions.current,
            created_at=str(result.get("created_at", "")),
            size_bytes=int(result.get("size_bytes", 0)),
            sha256=str(result.get("sha256", "")),
        )

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restore the checkpoint that `save` named in `directory`, also one of another job.

        Raises:
            TrainerError: `weights_only`, which the stock wire cannot say.
        """
        if weights_only:
            raise TrainerError("the stock wire always loads the optimizer; save with weights_only instead")
        wanted = RemoteCheckpoint.read(directory)
        body = {"checkpoint_id": wanted.record.checkpoint_id}
        if wanted.job_id != self._job_id:
            body["source_job_id"] = wanted.job_id
        request_id = await self._train(self._requests.submit(json_call("POST", "/load", body)))
        await self._train(self._requests.result(request_id))
        self._versions.restored(wanted.record.weights_version, is_published=wanted.is_published)
        self._global_steps = wanted.record.global_steps
        self._has_gradient = False

    async def close(self) -> None:
        """Nothing is held here: the job is its owner's to cancel."""

    # --- parts ---

    def _path(self, path: str) -> str:
        return f"/{segment(self._job_id)}{path}"

    @property
    def _num_samplers(self) -> int:
        return sum(sub_job.job_type == "sampling" for sub_job in self._body.sub_job_configs)

    async def _train[T](self, call: Awaitable[T]) -> T:
        """Await a trainer's call; where it failed because the job has ended, that is what is raised."""
        try:
            return await call
        except ServiceError as error:
            raise await self._explained(error) from error

    async def _explained(self, error: ServiceError) -> PilotageError:
        try:
            job = await self._jobs.get(self._job_id)
            if job.is_ended:
                return await self._jobs.failure(job)
        except ServiceError:
            pass
        return TrainerError(str(error))


def _stock_params(
    params: SamplingParams, turn_index: int, *, room: int, stops: Sequence[int]
) -> dict[str, Any]:
    """Return the sampling parameters of one prompt."""
    wanted: dict[str, Any] = {
        "max_tokens": min(params.max_tokens, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "logprobs": 0,
        "stop_token_ids": list(stops),
    }
    if params.top_k:
        wanted["top_k"] = params.top_k
    seed = params.turn_seed(turn_index, bits=31)
    if seed is not None:
        wanted["seed"] = seed
    return wanted


def _completion(result: Mapping[str, Any], version: int) -> Completion:
    """Read the one completion of a generate.

    Raises:
        SamplerError: it cannot be trained: no ids, or a log-prob is missing.
    """
    try:
        [found] = result["results"]
        ids = [int(token) for token in found["token_ids"]]
        logprobs = [_logprob(entry, token) for entry, token in zip(found["logprobs"], ids, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise SamplerError(f"the service's completion cannot be read: {error!r}") from None
    return Completion(
        token_ids=token_ids(ids),
        logprobs=np.array(logprobs, np.float32),
        weights_versions=np.full(len(ids), version, np.int32),
        finish_reason=FinishReason.STOP if found.get("finish_reason") == "stop" else FinishReason.LENGTH,
    )


def _logprob(entry: Mapping[str, Any], token: int) -> float:
    """Return the log-prob of a sampled token; entries go by id, whose order says nothing."""
    value = entry[str(token)] if str(token) in entry else entry[token]  # pyright: ignore[reportArgumentType]
    return float(value["logprob"] if isinstance(value, dict) else value)


def _measured(
    samples: Sequence[Sample], loss: LossConfig, result: Mapping[str, Any]
) -> ForwardBackwardResult:
    """Return what the service and the log-probs that it returned say about a batch."""
    metrics = result.get("metrics") or {}
    rows = (result.get("post_process_outputs") or {}).get("logprobs")
    scored_n, gap = None, None
    if rows is not None:
        scored_n = _trained(samples, from_stock_rows(samples, np.asarray(rows)))
    if scored_n is not None and loss.reads_sampler_logprobs:
        gap = logprob_gap(scored_n, _trained(samples, [s.sampler_logprobs for s in samples]))
    clipped = metrics.get("clip_ratio")
    counts = Denominators.of(samples)
    return ForwardBackwardResult(
        loss=float(result["avg_loss"]),
        trained_tokens=counts.trained_tokens,
        forwarded_tokens=sum(sample.token_ids.size for sample in samples),
        num_sequences=counts.num_sequences,
        logprob_gap_mean=None if gap is None else gap.mean,
        logprob_gap_max=None if gap is None else gap.max,
        gap_k3=None if gap is None else gap.k3,
        clip_fraction=float(clipped) if isinstance(clipped, int | float) else None,
        trainer_logprobs_n=None if scored_n is None else scored_n.astype(np.float32),
    )


def _trained(samples: Sequence[Sample], values: Sequence[Logprobs]) -> NDArray[np.float64]:
    """Return [n] the values of trained tokens, sample after sample."""
    parts = [value[sample.loss_mask] for sample, value in zip(samples, values, strict=True)]
    return np.concatenate([np.zeros(0), *parts], dtype=np.float64)
