"""The end of a relay that runs inside an environment: a program of the standard library alone.

    serve PORT DIRECTORY      answer HTTP on 127.0.0.1:PORT with what is put into DIRECTORY
    next DIRECTORY SECONDS    wait for something to do, and print it: `request ID` or `gone ID` lines
    probe PORT                ask /health through the relay; the exit code says whether it answered

A request is the file ID.request; its answer is ID.response, which another side makes. Both are one line of
JSON, then the body. ID.gone says that the client no longer waits. Every file appears whole, by renaming.
"""

import itertools
import json
import os
import select
import socket
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_POLL_S = 0.01
_HOP_HEADERS = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "expect")


def serve(port: int, directory: str) -> None:
    """Answer requests until the process is killed."""
    os.makedirs(directory, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler)
    names = itertools.count()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.forward()

        def do_POST(self) -> None:
            self.forward()

        def forward(self) -> None:
            with lock:
                path = os.path.join(directory, f"{next(names):08}")
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
            head = {"method": self.command, "path": self.path, "headers": headers}
            _put(path + ".request", head, body)
            while not os.path.exists(path + ".response"):
                if self.has_left():
                    _put(path + ".gone", {}, b"")
                    self.close_connection = True
                    return
                time.sleep(_POLL_S)
            answer, content = _take(path + ".response")
            self.send_response(answer["status"])
            for name, value in answer["headers"].items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def has_left(self) -> bool:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server.RequestHandlerClass = Handler
    server.daemon_threads = True
    server.serve_forever()


def next_work(directory: str, wait_s: float) -> None:
    """Print what there is to do; nothing where nothing came in time. What is printed is printed once."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        found = sorted(name for name in os.listdir(directory) if name.endswith((".request", ".gone")))
        for name in found:
            key, kind = name.rsplit(".", 1)
            os.rename(os.path.join(directory, name), os.path.join(directory, key + "." + kind + "-taken"))
            sys.stdout.write(f"{kind} {key}\n")
        if found:
            return
        time.sleep(_POLL_S)


def probe(port: int) -> None:
    """Raise unless the other side answers."""
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20).read()


def _put(path: str, head: "dict[str, Any]", body: bytes) -> None:
    with open(path + "-part", "wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + body)
    os.rename(path + "-part", path)


def _take(path: str) -> "tuple[dict[str, Any], bytes]":
    with open(path, "rb") as file:
        head, _, body = file.read().partition(b"\n")
    os.remove(path)
    return json.loads(head), body


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "next":
        next_work(sys.argv[2], float(sys.argv[3]))
    else:
        probe(int(sys.argv[2]))
