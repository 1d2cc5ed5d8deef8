"""The proxy's connections, on a real socket."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from tests.fakes import ScriptedSampler, WordRenderer

from pilotage.proxy import ChatCompletionsProxy, serve
from pilotage.types import SamplingParams, SessionSpec

_IDLE_S = 6.5
"""Longer than the five seconds after which a web server commonly closes, and its clients do not know it."""


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    await reader.readexactly(int(size.partition(b":")[2]))
    return head.splitlines()[0]


def make_proxy() -> ChatCompletionsProxy:
    nothing: Iterator[list[int]] = iter(())
    return ChatCompletionsProxy(ScriptedSampler(script=nothing), WordRenderer())


async def connect(proxy: ChatCompletionsProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = proxy.base_url.split("/")[2].split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_connection_that_was_idle_for_seconds_is_still_open() -> None:
    proxy = make_proxy()
    async with serve(proxy):
        reader, writer = await connect(proxy)
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        await asyncio.sleep(_IDLE_S)
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        writer.close()


async def test_a_client_that_leaves_before_its_request_has_arrived_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = make_proxy()
    access = proxy.open(SessionSpec(rollout_id="r", sampling=SamplingParams(), ttl_s=60, max_turns=1))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access.api_key}\r\n"
    with caplog.at_level(logging.INFO):
        async with serve(proxy):
            for part in (head, f"{head}Content-Length: 5000\r\n\r\n", f"{head}Content-Length: 50\r\n\r\n{{"):
                _, writer = await connect(proxy)
                writer.write(part.encode())
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.close()
            reader, writer = await connect(proxy)
            assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
            writer.close()
    record = await proxy.close(access)
    assert record.sampler_failure == ""
    assert record.counters["refused_body_incomplete"] == 2
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
