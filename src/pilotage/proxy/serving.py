"""Runs the proxy on a socket, inside the loop that is running."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator

import uvicorn

from pilotage.proxy.app import ChatCompletionsProxy

_BACKLOG = 512
_STOP_S = 5


@contextlib.asynccontextmanager
async def serve(proxy: ChatCompletionsProxy, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve `proxy` while the context is open; yields the base URL, which ends in /v1.

    The socket is bound here and handed over, so that a port of 0 is nobody else's in between.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        proxy.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,  # longer than clients keep idle connections
        timeout_graceful_shutdown=_STOP_S,
    )
    server = _EmbeddedServer(config)
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


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # The protocol is named because asyncio switches Nagle's delay off (40 ms an answer) only where it is.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn that leaves the process's signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the proxy's server ended before it listened")
        await asyncio.sleep(0.005)
