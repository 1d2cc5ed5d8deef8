"""Runs the page on a socket, or writes one page to a file."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import uvicorn

from pilotage.embedded import EmbeddedServer, listen
from pilotage.errors import ConfigError
from pilotage.files import write_atomically
from pilotage.ops.view.app import Viewer
from pilotage.ops.view.guard import is_loopback
from pilotage.ops.view.index import Index, cache_directory
from pilotage.ops.view.library import Library, Run
from pilotage.ops.view.summaries import PolicyText, open_renderer
from pilotage.ops.view.workers import WorkerProcesses

_BACKLOG = 128
_MOST_WORKERS = 4


@contextlib.asynccontextmanager
async def open_viewer(library: Library) -> AsyncGenerator[Viewer]:
    """Hold the worker processes and the index that a viewer needs."""
    count = max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1))
    workers = WorkerProcesses(count)
    index = Index(cache=cache_directory(), workers=workers, num_workers=count)
    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(index.follow())
            # Starts a process before the first page waits for it; and lets the index take requests.
            starting = group.create_task(workers.call(open_renderer, PolicyText(model="")))
            await asyncio.sleep(0)
            try:
                yield Viewer(library, index)
            finally:
                reading.cancel()
                starting.cancel()
    finally:
        workers.close()


async def serve(runs: Path, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        on_ready: told the address to open, with the key where `host` is not loopback.

    Raises:
        ConfigError: there is no such directory, or the address cannot be used.
    """
    library = Library(runs)
    local = is_loopback(host)
    key = None if local else secrets.token_urlsafe(24)
    try:
        listener = listen(host, port, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; give another --port, or 0 for a free one"
        ) from None
    async with open_viewer(library) as viewer:
        server = EmbeddedServer(
            uvicorn.Config(
                viewer.app(key=key, is_loopback=local),
                log_config=None,
                access_log=False,
                lifespan="off",
            )
        )

        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}/"
        on_ready(address if key is None else f"{address}?key={key}")
        await asyncio.wait([serving])  # cancelled, it is over at once: a page is nothing to wait for


async def export(path: Path, *, rollout: str | None, file: Path) -> None:
    """Write one self-contained HTML file of a run, or of one of its rollouts.

    Raises:
        ConfigError: it is no run, has no such rollout, or the file cannot be written.
    """
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is no run directory: it has no config.toml; --export takes one run")
    library = Library(path)
    run = Run(library.root)
    async with open_viewer(library) as viewer:
        html = await (viewer.export_run(run) if rollout is None else viewer.export_rollout(run, rollout))
    try:
        write_atomically(file, html.encode())
    except OSError as error:
        raise ConfigError(f"--export {file}: {error.strerror}") from None
