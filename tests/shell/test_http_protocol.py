"""What strangers may do to the service's socket: little."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from rollout_service import http_protocol
from rollout_service.http_protocol import LEAST, MAX_HEAD_BYTES, MAX_PIPELINED, bounded, connections_for


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every request with how large its body was."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    content = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def serving(most: int = 1000) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    config = uvicorn.Config(
        app, http=bounded(most), lifespan="off", log_config=None, port=0, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        await server.shutdown()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send `piece` until the other side has had enough."""
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 10)
            await asyncio.sleep(0)  # a turn for the server, which shares this loop
    writer.close()


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"], ids=["url", "one header", "many headers"]
)
async def test_a_head_without_end_is_refused_before_it_fills_the_memory(begin: bytes):
    piece = b"a: b\r\n" * 100 if begin.endswith(b"\n") else b"a" * 1000
    async with serving() as (port, _):
        reader, writer = await connect(port)
        writer.write(begin)
        await writer.drain()
        sent = len(begin)
        try:
            while not reader.at_eof() and sent < 3 * MAX_HEAD_BYTES:
                writer.write(piece)
                sent += len(piece)
                await writer.drain()
                await asyncio.sleep(0)  # a turn for the server, which shares this loop
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 431")
            assert b"/problems/head-too-large" in answer
        except ConnectionError:  # it closed while we still sent: the answer may be lost, the end is what counts
            assert sent > MAX_HEAD_BYTES
        writer.close()


async def test_a_connection_that_says_nothing_or_half_a_head_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with serving() as (port, _):
        for begin in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n"):
            reader, writer = await connect(port)
            writer.write(begin)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n")
        await asyncio.sleep(3 * http_protocol.HEAD_S)  # the length of the very thing: a body may take its time
        writer.write(b"abc")
        assert (await asyncio.wait_for(reader.readuntil(b"3"), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_large_body_and_a_few_pipelined_calls_are_fine():
    async with serving() as (port, _):
        reader, writer = await connect(port)
        body = b"x" * 3_000_000
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
        await writer.drain()
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 21:
            answers += await asyncio.wait_for(reader.read(65536), 10)
        assert b"3000000" in answers
        writer.close()


async def test_calls_piled_up_without_reading_an_answer_cut_the_connection():
    async with serving() as (port, server):
        reader, writer = await connect(port)
        await until_closed(reader, writer, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * (4 * MAX_PIPELINED))
        async with asyncio.timeout(10):
            while server.server_state.connections:
                await asyncio.sleep(0.01)  # between two looks


async def test_connections_beyond_the_bound_are_closed_and_the_others_answered():
    async with serving(most=3) as (port, _):
        held = [await connect(port) for _ in range(3)]
        for reader, writer in [await connect(port) for _ in range(5)]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        for reader, writer in held:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)).startswith(b"HTTP/1.1 200")
            writer.close()


def test_room_for_callers_is_what_engines_leave(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert connections_for(128) == 1024 - 128 - 256
    assert connections_for(4096) == LEAST
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 65_536))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert connections_for(128) == 65_536 - 128 - 256
    assert raised == [(65_536, 65_536)]
