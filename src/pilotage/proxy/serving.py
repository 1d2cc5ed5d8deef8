"""Runs the proxy on a socket, inside the loop that is running."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import uvicorn

from pilotage.embedded import EmbeddedServer, listen
from pilotage.errors import ConfigError
from pilotage.proxy.app import ChatCompletionsProxy
from pilotage.types import ProxyAddress

_BACKLOG = 512
_STOP_S = 5


@contextlib.asynccontextmanager
async def serve(proxy: ChatCompletionsProxy, address: ProxyAddress | None = None) -> AsyncGenerator[str]:
    """Serve `proxy` while the context is open; yields the base URL that sessions are given.

    Args:
        address: absent is any free port of loopback.

    Raises:
        ConfigError: the address cannot be bound.
    """
    address = address or ProxyAddress()
    host = f"[{address.host}]" if ":" in address.host else address.host
    try:
        listener = listen(address.host, address.port, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the proxy cannot listen at {host}:{address.port}: {error.strerror or error}; set"
            " rollouts.proxy_address"
        ) from error
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
    proxy.base_url = address.url or f"http://{host}:{listener.getsockname()[1]}/v1"
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
