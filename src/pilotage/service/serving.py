"""Runs the service on a socket until it is told to stop."""

import asyncio
import contextlib
import ipaddress
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pilotage.errors import ConfigError
from pilotage.service.app import Service
from pilotage.service.jobs import Jobs

_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where to listen, and how."""

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


async def serve(service: Service, jobs: Jobs, listen: Listen, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end all jobs.

    Args:
        on_ready: told the base URL once the socket is open and the jobs are restored.

    Raises:
        ConfigError: the address or the certificate cannot be used.
    """
    _raise_file_limit()
    listener = _bind(listen)
    server = _Server(
        uvicorn.Config(
            service.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            ssl_certfile=listen.tls_cert,
            ssl_keyfile=listen.tls_key,
        )
    )
    _load_certificate(server, listen)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await jobs.restore()
    scheme = "http" if listen.tls_cert is None else "https"
    on_ready(f"{scheme}://{listen.host}:{listener.getsockname()[1]}")
    async with asyncio.TaskGroup() as group:
        supervisor = group.create_task(jobs.supervise())
        try:
            await server.serve(sockets=[listener])
        finally:
            supervisor.cancel()
            await jobs.close()


def _bind(listen: Listen) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        # The protocol is named because asyncio switches Nagle's delay off only where it is.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def _load_certificate(server: uvicorn.Server, listen: Listen) -> None:
    try:
        server.config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{listen.tls_cert}, {listen.tls_key}: no usable certificate and key: {error}"
        ) from None


def _raise_file_limit() -> None:
    """Allow as many open files as the machine lets this user: every waiting call holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    """A uvicorn whose signals belong to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self):  # pyright: ignore
        yield

    def stop(self) -> None:
        self.should_exit = True
