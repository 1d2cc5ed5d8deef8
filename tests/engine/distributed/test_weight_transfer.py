"""The control calls of a weight transfer, as they reach the replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotage.engine.distributed.weight_transfer import Channel, ReplicaClient


@dataclass
class RemoteReplica:
    """Records calls the way a remote handle takes them: `handle.method.remote(...)`."""

    log: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def __getattr__(self, name: str) -> "RemoteMethod":
        return RemoteMethod(self, name)


@dataclass
class RemoteMethod:
    replica: RemoteReplica
    name: str

    def remote(self, *arguments: Any) -> str:
        self.replica.log.append((self.name, *arguments))
        return f"{self.name} started"


def test_every_replica_joins_at_ranks_of_its_own_and_every_call_is_waited_for() -> None:
    replicas, waited = [RemoteReplica(), RemoteReplica(), RemoteReplica()], list[Sequence[str]]()
    channel = Channel(backend="nccl", address="10.0.0.1", port=5, workers_per_replica=2)
    client = ReplicaClient(replicas, channel, wait=waited.append)

    # the sender is rank 0, so three replicas of two workers are ranks 1-2, 3-4 and 5-6
    client.init_weight_transfer_engine({"master_port": 5, "rank_offset": 1, "world_size": 7})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update("7")

    assert [replica.log[0][1]["rank_offset"] for replica in replicas] == [1, 3, 5]
    for replica in replicas:
        assert [name for name, *_ in replica.log] == [
            "init_weight_transfer",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ]
        assert replica.log[0][1]["world_size"] == 7
        assert replica.log[2][1:] == ({"names": ["w"]},)
        assert replica.log[3][1:] == ()  # versions are set when a replica resumes
    assert [len(calls) for calls in waited] == [3, 3, 3, 3]


def test_a_channel_without_ranks_is_joined_as_it_is() -> None:
    replica = RemoteReplica()
    channel = Channel(backend="ipc", address="", port=0, workers_per_replica=1)
    ReplicaClient([replica], channel, wait=len).init_weight_transfer_engine({"packed": True})
    assert replica.log == [("init_weight_transfer", {"packed": True})]
