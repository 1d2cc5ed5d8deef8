"""The process of one trainer rank: it joins the others, and then does what the engine tells all ranks."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pilotage.engine.distributed.fsdp import FsdpTrainer, TrainerOptions
from pilotage.engine.distributed.weight_transfer import Channel, ReplicaClient, open_sender

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer for the others fails; a lost rank is noticed by the engine, and at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: the store that rank 0 holds."""

    address: str
    port: int


class TrainerRank:
    """A remote `FsdpTrainer`. One call at a time, in the order in which they were made."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._trainer: FsdpTrainer | None = None
        self._sender: Any = None

    def listen(self) -> Rendezvous:
        """Open the store, on a port that the system chooses; rank 0 only."""
        address = node_address()
        self._store = TCPStore(
            address, 0, self._world_size, is_master=True, wait_for_workers=False, timeout=_COLLECTIVE_TIMEOUT
        )
        return Rendezvous(address=address, port=self._store.port)

    def join(self, meeting: Rendezvous, model_dir: Path, options: TrainerOptions, device: str) -> None:
        """Meet the other ranks and load the model.

        Raises:
            ConfigError: the directory is no usable model, or the options do not fit it.
        """
        if self._store is None:
            self._store = TCPStore(
                meeting.address, meeting.port, self._world_size, is_master=False, timeout=_COLLECTIVE_TIMEOUT
            )
        chosen = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(chosen)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self._trainer = FsdpTrainer(model_dir, options=options, device=chosen)

    def call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the trainer."""
        assert self._trainer is not None, "a rank joins first"
        return getattr(self._trainer, verb)(*arguments, **named)

    def open_channel(self, replicas: list[Any], channel: Channel) -> None:
        """Join the replicas' weight transfer; on every rank at the same time."""
        import ray

        assert self._trainer is not None, "a rank joins first"
        client = ReplicaClient(replicas, channel, wait=ray.get)
        self._sender = open_sender(self._trainer, client, channel, num_replicas=len(replicas))

    def send_weights(self) -> None:
        """Send the weights to all replicas; on every rank at the same time."""
        self._sender.send_weights()

    def free_port(self) -> Rendezvous:
        """Find a free port of this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return Rendezvous(address=node_address(), port=probe.getsockname()[1])


def node_address() -> str:
    """Return the address by which other nodes of the cluster reach this one."""
    import ray.util

    return ray.util.get_node_ip_address()
