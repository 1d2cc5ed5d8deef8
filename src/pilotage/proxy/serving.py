"""Runs the proxy on a socket, inside the loop that is running."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import uvicorn

from pilotage.embedded import EmbeddedServer, listen
from pilotage.proxy.app import ChatCompletionsProxy

_BACKLOG = 512
_STOP_S = 5


@contextlib.asynccontextmanager
async def serve(proxy: ChatCompletionsProxy, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve `proxy` while the context is open; yields the base URL, which ends in /v1.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = listen(host, port, backlog=_BACKLOG)
    config = uvicorn.Config(
        proxy.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",  # a request for a WebSocket is the app's to refuse
        timeout_keep_alive=75,  # longer than clients keep idle connections
        timeout_graceful_shutdown=_STOP_S,
    )
    server = EmbeddedServer(config)
    proxy.base_url = f"http://{host}:{listener.getsockname()[1]}/v1"
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _started(server, serving)
        yield proxy.base_url
    finally:
        server.should_exit = True
        await asyncio.wait({serving})
        listener.close()
    serving.result()  # a server that broke while it ran must not go unnoticed


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the proxy's server ended before it listened")
        await asyncio.sleep(0.005)
