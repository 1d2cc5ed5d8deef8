"""Runs the service on a socket until it is told to stop."""

import asyncio
import ipaddress
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pilotage.embedded import EmbeddedServer, listen
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


async def serve(service: Service, jobs: Jobs, at: Listen, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end all jobs.

    Args:
        on_ready: told the base URL once the socket is open and the jobs are restored.

    Raises:
        ConfigError: the address or the certificate cannot be used.
    """
    _raise_file_limit()
    listener = _bind(at)
    server = EmbeddedServer(
        uvicorn.Config(
            service.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            ssl_certfile=at.tls_cert,
            ssl_keyfile=at.tls_key,
        )
    )
    _load_certificate(server, at)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await jobs.restore()
    scheme = "http" if at.tls_cert is None else "https"
    on_ready(f"{scheme}://{at.host}:{listener.getsockname()[1]}")
    async with asyncio.TaskGroup() as group:
        supervisor = group.create_task(jobs.supervise())
        try:
            await server.serve(sockets=[listener])
        finally:
            supervisor.cancel()
            await jobs.close()


def _bind(at: Listen) -> socket.socket:
    try:
        return listen(at.host, at.port, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {at.host}:{at.port}: {error.strerror}") from None


def _load_certificate(server: uvicorn.Server, at: Listen) -> None:
    try:
        server.config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{at.tls_cert}, {at.tls_key}: no usable certificate and key: {error}") from None


def _raise_file_limit() -> None:
    """Allow as many open files as the machine lets this user: every waiting call holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
