"""A uvicorn that runs inside somebody else's event loop, and the socket that it is given."""

import contextlib
import socket
from collections.abc import Generator

import uvicorn


class EmbeddedServer(uvicorn.Server):
    """A server that leaves the process's signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing where uvicorn would take the signals over."""
        yield


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Bind and listen here, so that a port of 0 is nobody else's before the server has it.

    Raises:
        OSError: the address cannot be bound.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # The protocol is named because asyncio switches Nagle's delay off (40 ms an answer) only where it is.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
