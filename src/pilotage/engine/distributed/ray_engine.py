"""Trainer ranks and sampler replicas as Ray actors: the engine of a training job on many devices.

Ray chooses nodes, devices and addresses; there is no scheduler of ours. Every verb runs on all trainer ranks
at the same time. A sampler replica may be lost, and its sessions move; a trainer rank may not, because its
slices of the weights are gone with it: then the engine is over, and says so at every later call.
"""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import AutoConfig

from pilotage.algorithms import WeightsVersions
from pilotage.engine.checkpoint import Manifest, read_undamaged
from pilotage.engine.distributed.fsdp import TrainerOptions
from pilotage.engine.distributed.probe import TOLERANCE_BFLOAT16, TOLERANCE_FLOAT32, check, probe
from pilotage.engine.distributed.routing import StickyRouter
from pilotage.engine.distributed.torch_replica import TorchReplica
from pilotage.engine.distributed.trainer_rank import TrainerRank
from pilotage.engine.distributed.vllm_sampler import VllmSampler, VllmSettings
from pilotage.engine.distributed.weight_transfer import Channel
from pilotage.engine.policy import check_model_dir, eos_token_ids
from pilotage.errors import ConfigError, PilotageError, SamplerError, TrainerError
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

_AGENT_START_MS = "90000"
"""How long a new cluster's agents may take to start; Ray's own limit is missed on a busy machine."""
_CLOSE_S = 20.0
"""How long a replica may take to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What a job asks of a cluster."""

    trainer_ranks: int = 1
    sampler_replicas: int = 1
    device: Literal["cuda", "cpu"] = "cuda"
    """On CUDA replicas are vLLM engines; on the CPU they are the embedded engine's samplers."""
    tensor_parallel: int = 1
    """GPUs of one replica."""
    shares_gpus: bool = False
    """Whether rank i and replica i share one GPU; weights then go by CUDA IPC instead of NCCL."""
    max_context_tokens: int
    max_batch: int
    """Most completions that one replica samples at once."""
    stop_token_ids: tuple[int, ...] | None = None
    """Ids that end a completion; None reads them from the model's config."""
    trainer: TrainerOptions
    placement_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.trainer_ranks < 1 or self.sampler_replicas < 1:
            raise ConfigError(
                "an engine needs a trainer and a sampler, got"
                f" {self.trainer_ranks} and {self.sampler_replicas}"
            )
        if self.shares_gpus and (self.trainer_ranks != self.sampler_replicas or self.tensor_parallel != 1):
            raise ConfigError("shared GPUs need as many replicas as trainer ranks, of one GPU each")
        if self.shares_gpus and self.device != "cuda":
            raise ConfigError("shares_gpus is for CUDA devices")

    def bundles(self) -> list[dict[str, float]]:
        """Return what Ray is asked to keep together: ranks first, then replicas; or pairs that share."""
        if self.shares_gpus:
            pair: dict[str, float] = {"CPU": 2, "GPU": 1}
            return [pair] * self.trainer_ranks
        gpus = 1 if self.device == "cuda" else 0
        rank: dict[str, float] = {"CPU": 1, "GPU": gpus}
        replica: dict[str, float] = {"CPU": 1, "GPU": gpus * self.tensor_parallel}
        return [rank] * self.trainer_ranks + [replica] * self.sampler_replicas


class RayEngine:
    """Implements `Engine` on a Ray cluster."""

    def __init__(self, model_dir: Path, config: ClusterConfig) -> None:
        """Not to be called: `open` is."""
        self._model_dir = model_dir
        self._config = config
        self._owns_ray = False
        given = config.stop_token_ids
        self._stop_token_ids = eos_token_ids(model_dir) if given is None else given
        if not self._stop_token_ids:
            raise ConfigError(f"{model_dir} names no eos_token_id; give stop_token_ids")
        self._vocab_size: int = AutoConfig.from_pretrained(model_dir).get_text_config().vocab_size
        self._placement: PlacementGroup | None = None
        self._ranks: list[Any] = []
        self._replicas: list[Any] = []
        self._router = StickyRouter(config.sampler_replicas)
        # One verb at a time: the probe of a publish must score the weights that were sent.
        self._verb = asyncio.Lock()
        self._failure: TrainerError | None = None
        self._versions = WeightsVersions()

    @classmethod
    async def open(cls, model_dir: Path, config: ClusterConfig) -> "RayEngine":
        """Place and start all actors, and give the samplers the trainer's weights.

        A cluster that Ray is connected to is used; else the one that RAY_ADDRESS names, or a new one on
        this machine, which ends with the engine.

        Raises:
            ConfigError: the directory is no usable model or a damaged checkpoint, the options do not fit it,
                or the cluster has not the devices.
        """
        check_model_dir(model_dir)
        await asyncio.to_thread(read_undamaged, model_dir, weights_only=True)
        engine = cls(model_dir, config)
        try:
            await engine._connect()
            await engine._place()
            await engine._start()
            await engine._hand_over()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._config.max_context_tokens

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a completion."""
        return self._stop_token_ids

    @property
    def weights_version(self) -> int:
        """Version of the weights that the samplers use."""
        return self._versions.current

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`. A session stays with its replica; where that is lost, another one answers."""
        while True:
            self._require_alive()
            number = self._router.take(session_id)
            if number is None:
                raise SamplerError("no sampler replica is left; the job must be started again")
            replica = _Remote(self._replicas[number])
            try:
                return await replica.sample(prompt_ids, params, session_id=session_id, turn_index=turn_index)
            except RayActorError:
                self._router.lose(number)
            finally:
                self._router.release(number)

    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig, *, denominators: Denominators | None = None
    ) -> ForwardBackwardResult:
        """See `Trainer`."""
        async with self._verb:
            return await self._on_batch("forward_backward", samples, loss, denominators=denominators)

    async def forward(self, samples: Sequence[Sample], *, temperature: float) -> list[Logprobs]:
        """See `Trainer`."""
        async with self._verb:
            return await self._on_batch("forward", samples, temperature=temperature)

    async def step(self, params: AdamParams) -> StepResult:
        """See `Trainer`."""
        async with self._verb:
            [result, *_] = await self._on_ranks("step", params)
            self._versions.changed()
            return result

    async def discard(self) -> None:
        """See `Trainer`."""
        async with self._verb:
            await self._on_ranks("discard")

    async def publish(self) -> int:
        """Send the trainer's weights to all replicas, and prove of each that they arrived.

        Completions under way go on under the new weights, with their contexts computed again. After `load`
        of a checkpoint whose weights had been published, they keep the version they had.

        Raises:
            TrainerError: a replica and the trainer disagree on a probe, or a transfer failed.
        """
        async with self._verb:
            version = self._versions.advance()
            await self._hand_over()
            self._versions.published()
            return version

    async def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Trainer`. Ranks write their slices: all nodes must see `directory`."""
        async with self._verb:
            manifest = Manifest.of(self._versions)
            await self._on_ranks("save_state", directory, manifest, weights_only=weights_only)

    async def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Engine`. A plain model directory gives its weights, a fresh optimizer and version 0."""
        async with self._verb:
            manifest = await asyncio.to_thread(read_undamaged, directory, weights_only=weights_only)
            await self._on_ranks("load_state", directory, weights_only=weights_only)
            self._versions.restored(manifest.weights_version, is_published=manifest.is_published)

    async def close(self) -> None:
        """End all actors, and the cluster where the engine started it; calls that wait fail."""
        if self._failure is None:
            self._failure = TrainerError("the engine was closed")
            ends = [_plain(replica.close.remote()) for replica in self._replicas]
            # A replica that is lost or stuck is ended below.
            await asyncio.wait([asyncio.gather(*ends, return_exceptions=True)], timeout=_CLOSE_S)
            self._kill()
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)
            self._owns_ray = False

    async def _connect(self) -> None:
        """Use the cluster of this process, or start or join one."""
        if not ray.is_initialized():
            self._owns_ray = True
            os.environ.setdefault("RAY_agent_register_timeout_ms", _AGENT_START_MS)
            await asyncio.to_thread(ray.init, include_dashboard=False, log_to_driver=False)

    async def _place(self) -> None:
        """Reserve devices for all actors, or say what is missing."""
        bundles = self._config.bundles()
        self._placement = placement_group(bundles, strategy="PACK")
        try:
            await asyncio.wait_for(self._placement.ready(), self._config.placement_timeout_s)
        except TimeoutError as error:
            needed = {kind: sum(bundle[kind] for bundle in bundles) for kind in ("CPU", "GPU")}
            free = {kind: ray.available_resources().get(kind, 0) for kind in ("CPU", "GPU")}
            raise ConfigError(
                f"the cluster did not place {needed} within {self._config.placement_timeout_s:g} s; it has"
                f" {free} free. Ask for fewer devices, or end other jobs"
            ) from error

    async def _start(self) -> None:
        """Start ranks and replicas, and connect them."""
        config = self._config
        shared = 0.5 if config.shares_gpus else 1.0
        rank_class = ray.remote(TrainerRank)
        self._ranks = [
            rank_class.options(**self._resources(rank, gpus=shared)).remote(rank, config.trainer_ranks)
            for rank in range(config.trainer_ranks)
        ]
        first = 0 if config.shares_gpus else config.trainer_ranks
        self._replicas = [
            self._start_replica(self._resources(first + number, gpus=shared * config.tensor_parallel))
            for number in range(config.sampler_replicas)
        ]
        [meeting] = await self._together([self._ranks[0].listen.remote()])
        await self._together(
            [
                rank.join.remote(meeting, self._model_dir, config.trainer, config.device)
                for rank in self._ranks
            ]
        )
        if config.device == "cuda":
            await self._open_channel()

    def _resources(self, bundle: int, *, gpus: float) -> dict[str, Any]:
        """Return where an actor runs."""
        assert self._placement is not None
        return {
            "num_cpus": 1,
            "num_gpus": gpus if self._config.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=bundle
            ),
        }

    def _start_replica(self, resources: dict[str, Any]) -> Any:
        """Start one sampler actor, which answers many calls at once."""
        config = self._config
        options = {**resources, "max_concurrency": 4 * config.max_batch}
        if config.device == "cpu":
            return (
                ray.remote(TorchReplica)
                .options(**options)
                .remote(
                    self._model_dir,
                    max_context_tokens=config.max_context_tokens,
                    max_batch=config.max_batch,
                    stop_token_ids=self._stop_token_ids,
                )
            )
        settings = VllmSettings(
            model_dir=self._model_dir,
            max_context_tokens=config.max_context_tokens,
            max_batch=config.max_batch,
            stop_token_ids=self._stop_token_ids,
            tensor_parallel=config.tensor_parallel,
            gpu_memory_utilization=0.4 if config.shares_gpus else 0.9,
            weight_backend="ipc" if config.shares_gpus else "nccl",
            dtype=config.trainer.compute_dtype,
        )
        if config.shares_gpus:  # vLLM passes memory handles to its workers as pickled objects
            options["runtime_env"] = {"env_vars": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}}
        return ray.remote(VllmSampler).options(**options).remote(settings)

    async def _open_channel(self) -> None:
        """Let ranks and replicas join one weight transfer."""
        [meeting] = await self._together([self._ranks[0].free_port.remote()])
        channel = Channel(
            backend="ipc" if self._config.shares_gpus else "nccl",
            address=meeting.address,
            port=meeting.port,
            workers_per_replica=self._config.tensor_parallel,
        )
        await self._together([rank.open_channel.remote(self._replicas, channel) for rank in self._ranks])

    async def _hand_over(self) -> None:
        """Send weights, switch versions, and probe every replica."""
        if self._config.device == "cuda":
            await self._send_to_vllm()
        else:
            await self._send_to_torch()
        is_exact = self._config.trainer.compute_dtype == "float32"
        for number in self._router.replicas:
            try:
                samples = await probe(_Remote(self._replicas[number]), vocab_size=self._vocab_size)
            except RayActorError:
                self._router.lose(number)
                continue
            scored: list[Logprobs] = await self._on_batch("forward", samples, temperature=1.0)
            check(
                samples,
                scored,
                version=self._versions.current,
                tolerance=TOLERANCE_FLOAT32 if is_exact else TOLERANCE_BFLOAT16,
            )
        if not self._router.replicas:
            raise self._fail("the last sampler replica was lost")

    async def _send_to_vllm(self) -> None:
        """Freeze all replicas, transfer, and go on. Replicas share one channel, so none may be missing."""
        if len(self._router.replicas) != len(self._replicas):
            raise self._fail("a sampler replica was lost, and with it the channel of weights")
        await self._together([replica.pause.remote() for replica in self._replicas])
        await self._together([rank.send_weights.remote() for rank in self._ranks])
        await self._together([replica.resume.remote(self._versions.current) for replica in self._replicas])

    async def _send_to_torch(self) -> None:
        """Hand whole weights over through Ray's object store; a replica that is lost is left out."""
        [lead, *_] = refs = [rank.call.remote("gather_weights") for rank in self._ranks]
        await self._together(refs)
        for number in self._router.replicas:
            replica = self._replicas[number]
            try:
                await replica.receive.remote(lead)
                await replica.resume.remote(self._versions.current)
            except RayActorError:
                self._router.lose(number)

    async def _on_batch(self, verb: str, samples: Sequence[Sample], *arguments: Any, **named: Any) -> Any:
        """Call a verb whose samples only rank 0 is given, and return rank 0's result."""
        self._require_alive()
        refs = [
            rank.call.remote(verb, list(samples) if number == 0 else None, *arguments, **named)
            for number, rank in enumerate(self._ranks)
        ]
        [result, *_] = await self._together(refs)
        return result

    async def _on_ranks(self, verb: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a verb on every rank."""
        self._require_alive()
        return await self._together([rank.call.remote(verb, *arguments, **named) for rank in self._ranks])

    async def _together(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for all ranks or replicas.

        A deliberate error is raised by all of them alike, and the engine stays usable. Any other leaves the
        rest waiting for the one that failed: the engine is over.
        """
        calls = [asyncio.ensure_future(_plain(ref)) for ref in refs]
        try:
            return await asyncio.gather(*calls)
        except PilotageError:
            await asyncio.wait(calls)
            raise
        except RayError as error:
            raise self._fail(f"{type(error).__name__}: {error}") from error
        finally:
            for call in calls:
                call.cancel()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, why: str) -> TrainerError:
        """End the engine, and return what every later call raises."""
        reason = " ".join(why.split()).rstrip(".")  # Ray's errors have many lines
        self._failure = TrainerError(
            f"the engine is lost: {reason}. Start the job again from its last checkpoint"
        )
        self._kill()
        return self._failure

    def _kill(self) -> None:
        """End all actors at once, and give their devices back."""
        for actor in (*self._ranks, *self._replicas):
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


class _Remote:
    """A replica seen from here: its errors are its own, and a cancelled call is cancelled there."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`.

        Raises:
            RayActorError: the replica is lost.
        """
        ref = self._actor.sample.remote(prompt_ids, params, session_id=session_id, turn_index=turn_index)
        try:
            return await _plain(ref)
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayTaskError as error:
            raise SamplerError(f"a sampler replica failed: {error.cause!r}") from error


async def _plain[T](ref: Awaitable[T]) -> T:
    """Await a remote call; a deliberate error of ours comes without its wrapping."""
    try:
        return await ref
    except RayTaskError as error:
        if isinstance(error.cause, PilotageError):
            raise error.cause from None
        raise
