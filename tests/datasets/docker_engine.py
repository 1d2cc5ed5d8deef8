"""The part of Docker's API that copying files out of an image needs, for the real docker program."""

import base64
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

_VERSION = "1.43"
_STAT = base64.b64encode(
    json.dumps(
        {"name": "testbed", "size": 0, "mode": 2147484141, "mtime": "2024-10-01T00:00:00Z", "linkTarget": ""}
    ).encode()
).decode()


class DockerEngine:
    """Answers on loopback while the context is open; every container is called `c0ffee`."""

    def __init__(self, *, images: Mapping[str, bytes | None]) -> None:
        """Args:
        images: name -> tar of /testbed; None where the image has none.
        """
        self.images = images
        self.asked: list[str] = []
        """What was done with containers: create, archive, delete."""
        engine = self

        class Handler(_Handler):
            def _answer(self) -> None:
                engine._answer(self)

            do_GET = do_POST = do_HEAD = do_DELETE = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._archive: bytes | None = None
        self.address = f"tcp://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: "_Handler") -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        path = urlsplit(request.path).path.removeprefix(f"/v{_VERSION}")
        if path == "/containers/create":
            self.asked.append("create")
            image = json.loads(body)["Image"]
            if image not in self.images:
                return request.send(404, {"message": f"No such image: {image}"})
            self._archive = self.images[image]
            return request.send(201, {"Id": "c0ffee", "Warnings": []})
        if path == "/containers/c0ffee/archive":
            if self._archive is None:
                return request.send(404, {"message": "Could not find the file /testbed"})
            if request.command == "GET":
                self.asked.append("archive")
            return request.send(200, self._archive)
        if path == "/containers/c0ffee" and request.command == "DELETE":
            self.asked.append("delete")
            return request.send(204, b"")
        if path in ("/_ping", "/version"):
            return request.send(200, {"ApiVersion": _VERSION, "Version": "24.0.0", "Os": "linux"})
        return request.send(404, {"message": "not found"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, answer: Mapping[str, object] | bytes) -> None:
        is_tar = isinstance(answer, bytes)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/x-tar" if is_tar else "application/json")
        self.send_header("api-version", _VERSION)
        self.send_header("ostype", "linux")
        self.send_header("x-docker-container-path-stat", _STAT)
        if status != 204:
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""
