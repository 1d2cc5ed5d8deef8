"""The program that speaks to Ray for a driver: `python -m pilotage.rollouts.ray_helper FD PARENT ADDRESS`.

A process that is connected to Ray is ended by it a minute after the cluster's head is gone, is printed into,
and shares its signals; a driver has none of that. Lines of JSON over the socket FD:

    first             {"address": of this machine in the cluster} or {"config": what is wrong}
    {"id"}            {"id", "hosts": {id: address}}
    {"id", "host", "order"}    {"id"}                               `hosted_worker.follow` was called there
                      {"id", "config": why it failed there} or {"id", "lost": why there is no answer}
"""

import asyncio
import json
import logging
import signal
import socket
import sys
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pilotage.errors import ConfigError
from pilotage.processes import end_with_parent
from pilotage.rollouts.hosted_worker import follow

_KNOCK_S = 5.0


def _connect(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "://" not in address:  # Ray itself would ask for a minute
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        return {"config": _first_line(error)}
    return {"address": ray.util.get_node_ip_address()}


async def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        if "host" not in question:
            return {"hosts": await asyncio.to_thread(_hosts)}
        await _start(question["host"], question["order"])
    except RayTaskError as error:
        cause = error.cause
        said = (
            str(cause) if isinstance(cause, ConfigError) else f"{type(cause).__name__}: {_first_line(cause)}"
        )
        return {"config": said}
    except RayError as error:
        return {"lost": f"{type(error).__name__}: {_first_line(error)}"}
    return {}


def _hosts() -> dict[str, str]:
    """Return the living hosts that offer a CPU."""
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }


async def _start(host: str, order: str) -> None:
    there = NodeAffinitySchedulingStrategy(node_id=host, soft=False)
    # It takes no CPU: it must also run where other people's tasks have them all.
    task = ray.remote(follow).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    await asyncio.wrap_future(task.remote(order).future())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


async def _serve(descriptor: int, first: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))

    def say(answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")

    async def answer(question: dict[str, Any]) -> None:
        say({"id": question["id"], **await _answer(question)})

    say(first)
    answering: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        answering.add(task)
        task.add_done_callback(answering.discard)


def main() -> None:
    """Connect, and answer until the driver closes the socket."""
    end_with_parent(signal.SIGKILL, parent=int(sys.argv[2]))
    asyncio.run(_serve(int(sys.argv[1]), _connect(sys.argv[3])))


if __name__ == "__main__":
    main()
