"""A trainer and a sampler behind the public Tinker SDK.

The SDK keeps the session alive, numbers the calls of a trainer so that the server does each once, and repeats
what may be repeated. So nothing is repeated here, and a call that failed leaves a gradient of which nothing
is known: until a checkpoint is loaded, the trainer takes no more calls.

Importing this module imports the SDK; `tinker_sdk.check_sdk` says whether that can work.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
from numpy.typing import NDArray

from pilotage.algorithms import TrainedTokens, WeightsVersions, policy_loss
from pilotage.client.remote_checkpoint import new_id
from pilotage.client.tinker_checkpoint import TinkerCheckpoint
from pilotage.client.tinker_errors import attributed, sampler_error, service_error, trainer_error
from pilotage.client.tinker_losses import (
    WireLoss,
    check_loss,
    measured,
    needs_forward,
    no_loss,
    one_pass,
    probe,
    surrogate,
    trained_values,
    wire_loss_value,
)
from pilotage.client.tinker_sdk import TinkerConnection
from pilotage.client.tinker_wire import Rows, completion_of, data_of, grad_norm_of, logprob_rows
from pilotage.errors import (
    ConfigError,
    ContextExceededError,
    RequestFailedError,
    SamplerError,
    TrainerError,
    WaitTimeoutError,
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

_SUM_TOLERANCE = 1e-3
"""Relative: a server adds up in float32, or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerPlan:
    """The model that a run needs, and what it will ask of it."""

    base_model: str
    """As the server names it."""
    lora_rank: int
    lora_seed: int | None
    """Of the adapter's first weights; None leaves them to the server."""
    max_context_tokens: int
    stop_token_ids: tuple[int, ...]
    loss: LossConfig
    startup_timeout_s: float = 1800.0
    """Longest that the server may take to have a trainer ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    client: tinker.SamplingClient
    version: int


class TinkerEngine:
    """Implements `Engine` in one session. `tinker_session.open_tinker` makes one."""

    def __init__(self, service: tinker.ServiceClient, connection: TinkerConnection, plan: TinkerPlan) -> None:
        self._service = service
        self._connection = connection
        self._plan = plan
        self._training: tinker.TrainingClient | None = None
        self._published: _Published | None = None
        self._versions = WeightsVersions()
        self._order = asyncio.Lock()  # one trainer's call at a time: a loss of two passes must not be split
        self._num_backwards = 0
        self._has_gradient = False
        self._is_spoilt = False
        self._is_publishing = False
        self._scopes: set[asyncio.Timeout] = set()
        self._lost: str | None = None

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._plan.max_context_tokens

    @property
    def weights_version(self) -> int:
        """Version of the weights that the sampler uses, as counted here."""
        return self._versions.current

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion; every request states them."""
        return self._plan.stop_token_ids

    # --- sampler ---

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. A completion keeps the weights that it started with.

        Raises:
            WeightsChangingError: the server's only sampler has taken over newer ones in the middle of it.
        """
        room = self.max_context_tokens - int(prompt_ids.size)
        if room < 1:
            raise ContextExceededError(
                f"a prompt of {prompt_ids.size} tokens leaves no room in {self.max_context_tokens}"
            )
        published = self._published
        if published is None:
            failed = SamplerError("nothing was published yet; publish before the first sample")
            failed.retryable = False
            raise failed
        wanted = tinker.SamplingParams(
            max_tokens=min(params.max_tokens, room),
            seed=params.turn_seed(turn_index, bits=31),
            stop=list(self.stop_token_ids),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        prompt = tinker.ModelInput.from_ints(prompt_ids.tolist())
        try:
            with attributed("sample", self._connection.key, sampler_error):
                reply = await self._reply(
                    published.client.sample(prompt, num_samples=1, sampling_params=wanted)
                )
        except SamplerError as error:
            if self._is_publishing or self._published is not published:
                raise WeightsChangingError(str(error)) from error
            raise
        return completion_of(reply, published.version, self.stop_token_ids)

    # --- trainer ---

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """See `Trainer`. A loss that is none of the server's takes a forward pass first."""
        check_loss(loss)
        trained = [sample for sample in samples if sample.trained_tokens]
        whole = denominators or Denominators.of(trained)
        async with self._order:
            self._require_sound()
            if trained:
                logprobs_n = await self._add_gradient(trained, loss, whole)
            else:
                logprobs_n = np.zeros(0)
            self._num_backwards += 1
        return measured(trained, loss, whole, logprobs_n)

    async def _add_gradient(
        self, samples: Sequence[Sample], loss: LossConfig, whole: Denominators
    ) -> NDArray[np.float64]:
        """Send a batch's loss and return [n] the log-probs that it was evaluated on."""
        if not needs_forward(loss):
            rows = await self._backward(samples, one_pass(samples, loss, whole))
            return trained_values(samples, rows)
        logprobs_n = trained_values(samples, await self._forward(samples, no_loss(samples)))
        value = policy_loss(TrainedTokens.of(samples), logprobs_n, loss, denominators=whole)
        await self._backward(samples, surrogate(samples, value.gradient_n))
        return logprobs_n

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """See `Trainer`; at temperature 1 only."""
        if temperature != 1.0:
            raise TrainerError(f"a Tinker server scores at temperature 1 only, not {temperature:g}")
        trained = [sample for sample in samples if sample.trained_tokens]
        rows: Rows = []
        if trained:
            async with self._order:
                rows = await self._forward(trained, no_loss(trained))
        found = {id(sample): row for sample, row in zip(trained, rows, strict=True)}
        aligned = [np.zeros(sample.token_ids.size, np.float32) for sample in samples]
        for sample, values in zip(samples, aligned, strict=True):
            if sample.trained_tokens:
                values[1:] = np.where(sample.loss_mask[1:], found[id(sample)], 0)
        return aligned

    async def step(self, params: AdamParams) -> StepResult:
        """See `Trainer`. The norm is NaN where the server does not tell it."""
        async with self._order:
            self._require_sound()
            if not self._has_gradient:
                raise TrainerError("step without forward_backward: no gradient was accumulated")
            training = await self._trainer()
            wanted = tinker.AdamParams(
                learning_rate=params.learning_rate,
                beta1=params.beta1,
                beta2=params.beta2,
                eps=params.eps,
                weight_decay=params.weight_decay,
                grad_clip_norm=params.max_grad_norm,
            )
            reply = await self._change("optim_step", lambda: training.optim_step(wanted))
            num_backwards, self._num_backwards, self._has_gradient = self._num_backwards, 0, False
            self._versions.changed()
        return StepResult(
            grad_norm=grad_norm_of(reply.metrics or {}),
            learning_rate=params.learning_rate,
            num_backwards=num_backwards,
        )

    async def discard(self) -> None:
        """See `Trainer`.

        Raises:
            TrainerError: there is a gradient, which this wire cannot drop; a load can.
        """
        if self._has_gradient:
            raise TrainerError(
                "a Tinker server cannot drop a gradient; load a checkpoint, which starts without"
            )
        self._num_backwards = 0

    async def publish(self) -> int:
        """See `Trainer`. The sampler gets a snapshot of its own; the one before it is let go."""
        async with self._order:
            self._require_sound()
            training = await self._trainer()
            self._is_publishing = True
            try:
                with attributed("save_weights_for_sampler", self._connection.key, trainer_error):
                    client = await self._reply(training.save_weights_and_get_sampling_client())
            finally:
                self._is_publishing = False
            version = self._versions.advance()
            self._published = _Published(client=client, version=version)
            self._versions.published()
        return version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """Keep a checkpoint at the server, and write its name into a new directory.

        Args:
            weights_only: a load starts a fresh optimizer; the server keeps the optimizer all the same.
        """
        async with self._order:
            self._require_sound()
            training = await self._trainer()
            with attributed("save_state", self._connection.key, trainer_error):
                saved = await self._reply(training.save_state(new_id(directory)))
            record = TinkerCheckpoint(
                base_url=self._connection.base_url,
                path=saved.path,
                weights_version=self._versions.current,
                is_published=self._versions.is_published,
                weights_only=weights_only,
            )
        await asyncio.to_thread(record.write, directory)

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Restore the checkpoint that `save` named in `directory`, in a new model without a gradient.

        Raises:
            ConfigError: the directory names none.
            ServiceError: the server does not have it.
        """
        wanted = TinkerCheckpoint.read(directory)
        create = self._service.create_training_client_from_state_with_optimizer
        if weights_only or wanted.weights_only:
            create = self._service.create_training_client_from_state
        async with self._order:
            what = f"{wanted.path}, which was saved at {wanted.base_url}"
            self._training = await self._created(lambda: create(wanted.path), what)
            self._num_backwards, self._has_gradient, self._is_spoilt = 0, False, False
            self._versions.restored(wanted.weights_version, is_published=wanted.is_published)

    async def close(self) -> None:
        """Nothing is held here: the session is its owner's to finish."""

    def lose(self, what: str) -> None:
        """Fail every call that waits, and those to come: the server is gone.

        Args:
            what: is known of it.
        """
        self._lost = what
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    # --- parts ---

    async def _reply[T](self, call: Awaitable[T]) -> T:
        """Await the SDK, which by itself would wait for ever for a server that is gone."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                if self._lost is not None:
                    scope.reschedule(0)
                return await call
        except TimeoutError:
            if not scope.expired():
                raise
            raise TimeoutError(self._lost) from None
        finally:
            self._scopes.discard(scope)

    def _require_sound(self) -> None:
        if self._is_spoilt:
            raise TrainerError(
                "an earlier call failed, and what it left at the server is unknown; resume from the newest"
                " checkpoint"
            )

    async def _trainer(self) -> tinker.TrainingClient:
        """Return the training client, made anew the first time, and then seen to add up."""
        if self._training is None:
            plan = self._plan
            created = await self._created(
                lambda: self._service.create_lora_training_client(
                    plan.base_model, rank=plan.lora_rank, seed=plan.lora_seed
                ),
                plan.base_model,
            )
            info = created.get_info()
            if info.lora_rank not in (None, plan.lora_rank):
                raise ConfigError(
                    f"tinker.lora_rank is {plan.lora_rank}, and the server has {info.lora_rank}"
                )
            self._training = created
        return self._training

    async def _created(
        self, create: Callable[[], tinker.BackcompatTrainingClientFuture], what: str
    ) -> tinker.TrainingClient:
        """Have a training client made, and see that the server adds up as this backend needs it.

        Args:
            what: it is of, for errors.
        """
        base_url, key = self._connection.base_url, self._connection.key
        try:
            async with asyncio.timeout(self._plan.startup_timeout_s):
                with attributed(f"{base_url} made no training client of {what}", key, service_error):
                    made = await asyncio.to_thread(create)  # the first call waits for the session
                    training = await made
                await self._check_sums(training)
        except TimeoutError:
            raise WaitTimeoutError(
                f"{base_url} had no training client of {what} after {self._plan.startup_timeout_s:g} s; try"
                " later, or raise tinker.startup_timeout_s"
            ) from None
        return training

    async def _check_sums(self, training: tinker.TrainingClient) -> None:
        """Score two short sequences, and compare the server's loss with ours.

        Raises:
            ServiceError: it has not this loss, or another one by its name: it averages, or weights by itself.
        """
        samples = [probe(self.stop_token_ids[0], size) for size in (3, 5)]
        counts = Denominators.of(samples)
        wires = [surrogate(samples, np.array([0.5, -1.0, 2.0, 1.5, -0.25, 3.0]))]
        if not needs_forward(self._plan.loss):
            wires.append(one_pass(samples, self._plan.loss, counts))
        for wire in wires:
            with attributed(f"the server has no loss {wire.name}", self._connection.key, service_error):
                rows, total = await self._scored(training, samples, wire)
            expected = wire_loss_value(wire, rows)
            if total is None:
                raise RequestFailedError(
                    f"{self._connection.base_url} does not tell its loss (metric loss:sum), so nobody can say"
                    " whether it sums weighted tokens as the Tinker API does; use another server"
                )
            if not math.isclose(total, expected, rel_tol=_SUM_TOLERANCE, abs_tol=_SUM_TOLERANCE):
                raise RequestFailedError(
                    f"{self._connection.base_url} makes {total:g} of a loss {wire.name} that is {expected:g}:"
                    " it does not sum weighted tokens as the Tinker API does; use another server"
                )

    async def _forward(self, samples: Sequence[Sample], wire: WireLoss) -> Rows:
        training = await self._trainer()
        with attributed("forward", self._connection.key, trainer_error):
            rows, _ = await self._scored(training, samples, wire)
        return rows

    async def _scored(
        self, training: tinker.TrainingClient, samples: Sequence[Sample], wire: WireLoss
    ) -> tuple[Rows, float | None]:
        """Return the log-probs of all targets, and the loss where the server tells it; no gradient."""
        data = await asyncio.to_thread(data_of, samples, wire)
        output = await self._reply(training.forward(data, wire.name, wire.config))
        return logprob_rows(samples, output), output.metrics.get("loss:sum")

    async def _backward(self, samples: Sequence[Sample], wire: WireLoss) -> Rows:
        training = await self._trainer()
        data = await asyncio.to_thread(data_of, samples, wire)
        self._has_gradient = True
        output = await self._change(
            "forward_backward", lambda: training.forward_backward(data, wire.name, wire.config)
        )
        return logprob_rows(samples, output)

    async def _change[T](self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Carry out a call that changes gradient or weights; one that does not end well spoils both."""
        self._is_spoilt = True
        with attributed(what, self._connection.key, trainer_error):
            result = await self._reply(call())
        self._is_spoilt = False
        return result
