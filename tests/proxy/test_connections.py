"""The proxy's connections, on a real socket."""

import asyncio
from collections.abc import Iterator

from tests.fakes import ScriptedSampler, WordRenderer

from pilotage.proxy import ChatCompletionsProxy, serve

_IDLE_S = 6.5
"""Longer than the five seconds after which a web server commonly closes, and its clients do not know it."""


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    await reader.readexactly(int(size.partition(b":")[2]))
    return head.splitlines()[0]


async def test_a_connection_that_was_idle_for_seconds_is_still_open() -> None:
    nothing: Iterator[list[int]] = iter(())
    proxy = ChatCompletionsProxy(ScriptedSampler(script=nothing), WordRenderer())
    async with serve(proxy):
        host, port = proxy.base_url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        await asyncio.sleep(_IDLE_S)
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        writer.close()
