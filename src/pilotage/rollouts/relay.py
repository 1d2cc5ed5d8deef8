"""A relay: how an agent inside an environment reaches the proxy where there is no network between them.

It uses nothing but the environment's own exec and file transfer, so it works wherever Harbor runs a trial, if
there is a python3:

    agent --HTTP--> relay_program in the environment --files--> Relay here --HTTP--> proxy

The relay forwards to the proxy alone. It costs two commands and two transfers a model call, and answers are
passed on whole: the proxy knows an answer's first byte no sooner than its last.
"""

import asyncio
import json
import shlex
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
from harbor.environments.base import BaseEnvironment

from pilotage.errors import PilotageError

_DIRECTORY = "/tmp/.pilotage-relay"
_PROGRAM = f"{_DIRECTORY}/relay.py"
_WAIT_S = 20
"""Of one look for work; a command of the environment each."""
_REQUEST_TIMEOUT_S = 3600.0
_MAX_REQUEST_BYTES = 65 * 2**20
"""A little more than the proxy takes: what is inside must not fill the memory here."""
_ANSWER_HEADERS = ("content-type", "retry-after", "www-authenticate")


class RouteError(PilotageError):
    """An agent inside an environment has no way to the proxy."""


class Relay:
    """Carries the model calls of one trial; an async context manager.

    Args:
        environment: runs; has python3.
        base_url: the proxy's, ending in /v1.
        port: where the agent finds the proxy, on 127.0.0.1 inside.
    """

    def __init__(self, environment: BaseEnvironment, *, base_url: str, port: int) -> None:
        self._environment = environment
        self._port = port
        url = urlsplit(base_url)
        self._origin = f"{url.scheme}://{url.netloc}"
        self._client = httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, trust_env=False)
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start both ends and ask the proxy for its health from inside.

        Raises:
            RouteError: no answer came through.
        """
        await self._run(f"mkdir -p {_DIRECTORY}/work")
        await self._environment.upload_file(Path(__file__).with_name("relay_program.py"), _PROGRAM)
        serve = f"python3 {_PROGRAM} serve {self._port} {_DIRECTORY}/work"
        await self._run(f"({serve} </dev/null >{_DIRECTORY}/log 2>&1 &)")
        self._pump = asyncio.create_task(self._carry())
        probe = (
            f"for i in 1 2 3 4 5; do python3 {_PROGRAM} probe {self._port} && exit 0; sleep 0.3; done; exit 1"
        )
        try:
            await self._run(f"{{ {probe}; }} 2>&1 || {{ cat {_DIRECTORY}/log; exit 1; }}")
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop both ends; may be called more than once.

        Raises:
            RouteError: the relay broke while the agent ran.
        """
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            [ended] = await asyncio.gather(pump, return_exceptions=True)
            await self._client.aclose()
            if isinstance(ended, Exception):
                raise RouteError(f"the relay broke while the agent ran: {_reason(ended)}") from ended

    async def _carry(self) -> None:
        """Look for work for ever: each request is a task, and one whose client left is cancelled."""
        look = f"python3 {_PROGRAM} next {_DIRECTORY}/work {_WAIT_S}"
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                for line in (await self._run(look)).splitlines():
                    kind, _, key = line.partition(" ")
                    if kind == "request":
                        running[key] = group.create_task(self._forward(key))
                        running[key].add_done_callback(lambda _, key=key: running.pop(key, None))
                    elif kind == "gone" and key in running:
                        running[key].cancel()

    async def _forward(self, key: str) -> None:
        path = f"{_DIRECTORY}/work/{key}"
        with tempfile.TemporaryDirectory(prefix="pilotage-relay-") as directory:
            request, response = Path(directory, "request"), Path(directory, "response")
            await self._environment.download_file(f"{path}.request-taken", request)
            status, headers, content = await self._answer(await asyncio.to_thread(_read, request))
            start = json.dumps({"status": status, "headers": headers}).encode()
            await asyncio.to_thread(response.write_bytes, start + b"\n" + content)
            await self._environment.upload_file(response, f"{path}.part")
            await self._run(f"mv {path}.part {path}.response")

    async def _answer(self, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return the proxy's status, headers and body; what came out of the environment is not trusted."""
        head, _, body = sent.partition(b"\n")
        asked = json.loads(head)
        path = str(asked["path"])
        if not path.startswith(("/v1/", "/health")):
            return 404, {"content-type": "text/plain"}, b"the relay carries /v1/ alone"
        try:
            url = self._origin + path
            answer = await self._client.request(asked["method"], url, headers=asked["headers"], content=body)
        except httpx.HTTPError as error:
            return 502, {"content-type": "text/plain"}, f"the relay cannot reach the proxy: {error}".encode()
        headers = {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}
        return answer.status_code, headers, answer.content

    async def _run(self, command: str) -> str:
        result = await self._environment.exec(command, cwd="/", timeout_sec=60)
        if result.return_code != 0:
            reason = " ".join(((result.stdout or "") + (result.stderr or "")).split())[-300:]
            raise RouteError(f"the relay does not work in this environment (it needs python3): {reason}")
        return result.stdout or ""


async def check_address(environment: BaseEnvironment, base_url: str) -> None:
    """Ask the proxy for its health from inside; an environment with neither curl nor python3 is believed.

    Raises:
        RouteError: no answer.
    """
    url = f"{base_url.removesuffix('/v1')}/health"
    by_python = f'import urllib.request; urllib.request.urlopen("{url}", timeout=10)'
    command = (
        f"if command -v curl; then curl -sf -m 10 {url}; elif command -v python3; then"
        f" python3 -c {shlex.quote(by_python)}; fi"
    )
    if (await environment.exec(command, timeout_sec=30)).return_code != 0:
        raise RouteError(
            f'{url} does not answer inside the environment: set agent_route = "relay", give the task a'
            " network, or set proxy_address or proxy_url to where the proxy can be found from there"
        )


def _read(request: Path) -> bytes:
    if request.stat().st_size > _MAX_REQUEST_BYTES:
        raise RouteError(f"a request is larger than {_MAX_REQUEST_BYTES} bytes")
    return request.read_bytes()


def _reason(error: BaseException) -> str:
    """Return the first plain error of a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
