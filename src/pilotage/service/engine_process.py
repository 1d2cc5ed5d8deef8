"""The program of an engine process: `EngineHost` behind HTTP on a unix socket.

The front that started it may be killed and another may take over, so the process waits for a while without
one; then it ends, and frees what it held.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotage.embedded import EmbeddedServer
from pilotage.service.core_routes import CoreRoutes
from pilotage.service.engine_host import EngineHost, JobSpec, OpenEngine
from pilotage.service.gpu_meter import open_meter
from pilotage.service.refusals import exception_handlers, json_response
from pilotage.service.stock_routes import StockRoutes
from pilotage.service.tinker_routes import TinkerRoutes

_LOG = logging.getLogger(__name__)
_ORPHAN_S = 60.0
"""An engine that no front has asked for so long ends."""


def build_app(host: EngineHost) -> Starlette:
    """Return the app that answers for one engine."""

    async def health(request: Request) -> Response:
        host.asked.set()
        state = {
            "job_id": host.spec.job_id,
            "pid": os.getpid(),
            "status": host.status,
            "reason": host.failure,
        }
        return json_response(state | {"in_flight": host.operations.num_in_flight})

    routes = [
        Route("/health", health),
        *CoreRoutes(host).routes(),
        *StockRoutes(host).routes(),
        *TinkerRoutes(host).routes(),
    ]
    return Starlette(routes=routes, exception_handlers=exception_handlers("the engine process"))


async def serve_engine(directory: Path, open_engine: OpenEngine) -> None:
    """Run until SIGTERM, or until no front asks any more.

    Args:
        directory: the job's; holds `job.json`.
        open_engine: makes the engine that the spec asks for.
    """
    spec = JobSpec.read(directory)
    _be_the_first_to_die()
    host = EngineHost(spec, open_engine)
    config = uvicorn.Config(
        build_app(host), uds=str(spec.socket), log_config=None, access_log=False, lifespan="off",
        timeout_graceful_shutdown=3,
        timeout_keep_alive=75,  # longer than the front keeps one, else both end it at the same moment
    )  # fmt: skip
    server = EmbeddedServer(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(_open(host))
        watching = [group.create_task(_watch(host, stop))]
        meter = open_meter(directory / "gpu.jsonl")
        if meter is not None:
            watching.append(group.create_task(meter.run()))
        await server.serve()
        for task in (opening, *watching):
            task.cancel()
    await host.close()
    shutil.rmtree(spec.socket.parent, ignore_errors=True)  # where no front is left to do it


async def _open(host: EngineHost) -> None:
    with contextlib.suppress(Exception):  # kept as the host's failure, which the front reads
        await host.open()


async def _watch(host: EngineHost, stop: Callable[[], None]) -> None:
    """Stop when no front has asked for a while."""
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(_ORPHAN_S):
                await host.asked.wait()
            host.asked.clear()
    _LOG.warning("no front has asked for %.0f s; the engine ends", _ORPHAN_S)
    stop()


def _be_the_first_to_die() -> None:
    """Tell the kernel to kill this process before the front where memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800", encoding="ascii")
