"""The trainer's side of vLLM's weight transfer: it sends, over NCCL or CUDA IPC, what all replicas receive.

Every rank takes part in a send, because making one weight whole is a collective; rank 0 alone speaks to the
replicas. Written for the interface of vLLM 0.30 to 0.33 (`vllm.distributed.weight_transfer`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from pilotage.engine.distributed.fsdp import FsdpTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Where trainer and replicas meet."""

    backend: Literal["nccl", "ipc"]
    address: str
    port: int
    workers_per_replica: int
    """vLLM workers of one replica: its tensor parallel size."""


class ReplicaClient:
    """vLLM's control calls, made to every replica at once; returns when all have answered, or raises."""

    def __init__(
        self,
        replicas: Sequence[Any],
        channel: Channel,
        *,
        wait: Callable[[Sequence[Any]], object],
    ) -> None:
        """Make a client.

        Args:
            replicas: handles of remote `VllmSampler`s: `handle.method.remote(...)` starts a call.
            wait: returns when the started calls have ended, and raises what one of them raised.
        """
        self._replicas = replicas
        self._channel = channel
        self._wait = wait

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Let every replica's workers join, each at ranks of its own behind the sender's."""
        calls: list[Any] = []
        for number, replica in enumerate(self._replicas):
            own = dict(init_info)
            if "rank_offset" in own:
                own["rank_offset"] += number * self._channel.workers_per_replica
            calls.append(replica.init_weight_transfer.remote(own))
        self._wait(calls)

    def start_weight_update(self) -> None:
        """Begin a transfer."""
        self._wait([replica.start_weight_update.remote() for replica in self._replicas])

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive what is being sent."""
        self._wait([replica.update_weights.remote(dict(update_info)) for replica in self._replicas])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a transfer. Versions are ours, and are set when a replica resumes."""
        self._wait([replica.finish_weight_update.remote() for replica in self._replicas])


def open_sender(trainer: FsdpTrainer, client: ReplicaClient, channel: Channel, *, num_replicas: int) -> Any:
    """Join replicas and trainer, on every rank; the result's `send_weights()` is one transfer."""
    from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
        ParamMeta,
        WeightSource,
        WeightTransferTrainerFactory,
    )

    class Source(WeightSource):  # pyright: ignore[reportUntypedBaseClass]
        """The trainer's weights, made whole one after the other."""

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, trainer.wire_dtype, shape) for name, shape in trainer.weight_shapes()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, weight in trainer.weights():
                yield name, weight.contiguous()

    return WeightTransferTrainerFactory.trainer_init(
        init_info=_init_info(channel, num_replicas), client=client, source=Source()
    )


def _init_info(channel: Channel, num_replicas: int) -> Any:
    if channel.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
            IPCTrainerInitInfo,
        )

        return IPCTrainerInitInfo(rank=dist.get_rank(), packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLTrainerInitInfo,
    )

    return NCCLTrainerInitInfo(
        master_address=channel.address,
        master_port=channel.port,
        world_size=1 + num_replicas * channel.workers_per_replica,
        rank=dist.get_rank(),
        packed=True,
    )
