"""Servers within a test's own loop that end in order, whenever that is: each connection they accepted ends with them.

asyncio's loop of Python 3.11 accepts a connection some turns before the server knows of it. One that is between the two
when the server closes is left open, as is one whose handler was not begun: the warning of its collection would fail
whichever test runs at that moment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ACCEPTING_TURNS = 4
"""From an accepted connection to the first step of its handler: its task, its transport, its streams, its handler."""


class OrderlyLoop(asyncio.SelectorEventLoop):
    """asyncio's own, which closes what a server of its own did not get to know before it ended."""

    # Called by the loop for each connection; later versions of Python close it themselves.
    async def _accept_connection2(
        self, factory: Any, conn: socket.socket, extra: Any, sslcontext: Any = None, server: Any = None, *limits: float
    ) -> None:
        if server is None or server.sockets:
            await super()._accept_connection2(  # type: ignore[misc]  # a method typeshed does not know
                factory, conn, extra, sslcontext, server, *limits
            )
        else:
            conn.close()


class Listener:
    """One server, and the connections it handles."""

    address: str
    """`host:port`"""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        self._server.close()
        await _begun()
        handlers = set(self._handlers)
        self.cut_all()
        await asyncio.gather(*handlers, return_exceptions=True)
        await self._server.wait_closed()

    def cut_all(self) -> None:
        for handler in self._handlers:
            handler.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._handle(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the server ends: so does this connection
        finally:
            self._handlers.discard(task)
            await cut(writer)


@asynccontextmanager
async def listening(handle: Handler) -> AsyncIterator[str]:
    """`host:port` of a server that handles connections with `handle`; those still there at the end are cut off."""
    listener = Listener(handle)
    await listener.start()
    try:
        yield listener.address
    finally:
        await listener.stop()


async def hear_no_more(runner: web.BaseRunner[Any]) -> None:
    """Accept nothing more; what was accepted is known to the runner's server."""
    for site in list(runner.sites):
        await site.stop()
    await _begun()


async def end(runner: web.BaseRunner[Any]) -> None:
    """The runner's `cleanup`, with no connection in the making."""
    await hear_no_more(runner)
    await runner.cleanup()


async def _begun() -> None:
    for _ in range(ACCEPTING_TURNS):
        await asyncio.sleep(0)  # a turn of the loop: nothing tells of the connection in between


async def cut(writer: asyncio.StreamWriter) -> None:
    """End the connection, whatever is still to be written."""
    writer.transport.abort()
    with suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()
