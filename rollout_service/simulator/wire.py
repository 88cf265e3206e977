"""HTTP/1.1 on sockets: bytes in, `Exchange`s out, one at a time for each connection.

Always holds:
- An exchange is answered once; a second answer, or one after the connection is gone, does nothing.
- A connection that goes away while its exchange is open calls the exchange's `on_close` once, whatever it was doing.
- A connection carries at most one open exchange; pipelined requests wait for it.

It stands directly on an `asyncio.Protocol` and the llhttp parser: no task, no future and no timer for each request.
Measured side by side, aiohttp's server costs more CPU for an answer that stands ready than this does for a whole
completion, and a benchmark needs an engine that is not its limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qsl

import httptools
import msgspec

MAX_BODY = 64 * 2**20
"""As large as any batch of prompts here; past it the caller is refused and cut."""
_SWEEP_SHARE = 0.25
"""How often idle connections are looked for, as a share of the time they may idle: one timer for all of them."""
FLUSH_S = 1.0
"""How long a stop waits for clients that do not read what was written to them."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_OK_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

JSON = "application/json"
_log = logging.getLogger(__name__)


class Exchange:
    """One request, and the means to answer it."""

    __slots__ = (
        "_connection",
        "_streaming",
        "answered",
        "body",
        "headers",
        "keep_alive",
        "method",
        "on_close",
        "target",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.method = ""
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.keep_alive = True
        self.answered = False
        self.on_close: Callable[[], None] | None = None
        self._streaming = False

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True))

    @property
    def gone(self) -> bool:
        """The caller hung up before the answer."""
        return self._connection is None and not self.answered

    def answer(self, body: bytes, *, status: int = 200, content_type: str | None = JSON, close: bool = False) -> None:
        """Sends the whole answer; `close` ends the connection after it."""
        connection = self._connection
        if self.answered or connection is None:
            return
        if status == 200 and content_type is JSON and self.keep_alive and not close:
            connection.write(_OK_JSON % len(body) + body)
        else:
            connection.write(self._head(status, content_type, f"content-length: {len(body)}", close) + body)
        self._end(close)

    def answer_json(self, value: object, *, status: int = 200, close: bool = False) -> None:
        self.answer(msgspec.json.encode(value), status=status, close=close)

    def answer_part(self, body: bytes, *, share: float = 0.5) -> None:
        """Announces all of `body`, sends a part of it, and cuts the connection."""
        connection = self._connection
        if self.answered or connection is None:
            return
        connection.write(self._head(200, JSON, f"content-length: {len(body)}", False) + body[: int(len(body) * share)])
        self.answered = True
        connection.close()

    def start_stream(self) -> None:
        """Opens an event stream; `send` and `end_stream` follow."""
        connection = self._connection
        if self.answered or self._streaming or connection is None:
            return
        self._streaming = True
        connection.write(self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked", False))

    def send(self, data: bytes) -> None:
        if self._connection is not None and not self.answered:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        if self._connection is not None and not self.answered:
            self._connection.write(b"0\r\n\r\n")
            self._end(False)

    def cut(self) -> None:
        """Resets the connection instead of answering."""
        if self._connection is not None:
            self.answered = True
            self._connection.abort()

    def lost(self) -> None:
        """The connection is gone."""
        self._connection = None
        callback, self.on_close = self.on_close, None
        if callback is not None and not self.answered:
            callback()

    def _head(self, status: int, content_type: str | None, framing: str, close: bool) -> bytes:
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {status} {phrase}"]
        if content_type is not None:
            lines.append(f"content-type: {content_type}")
        lines.append(framing)
        if close or not self.keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _end(self, close: bool) -> None:
        self.answered = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange_done(close or not self.keep_alive)


class Connection(asyncio.Protocol):
    """One client connection: parses requests and hands them, in order, to the listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Exchange | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._queued: deque[Exchange] = deque()
        self.current: Exchange | None = None
        self.idle_since = 0.0

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: uvloop's transports are asyncio's in all but the class.
        self._transport = cast(asyncio.Transport, transport)
        self.idle_since = self._listener.now()
        self._listener.connections.add(self)
        if self._listener.closing:  # accepted before it stopped, made after
            self.abort()

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self._listener.lost(self)
        self._queued.clear()
        current, self.current = self.current, None
        if current is not None:
            current.lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrades are not supported")
        except httptools.HttpParserError as problem:
            self._refuse(400, f"not HTTP: {problem}")

    # -- httptools

    def on_message_begin(self) -> None:
        self._arriving = Exchange(self)
        self._parts = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        if self._arriving is not None:
            self._arriving.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving is not None:
            self._arriving.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._arriving is not None and self._arriving.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= MAX_BODY:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        exchange, self._arriving = self._arriving, None
        if exchange is None:
            return
        if self._size > MAX_BODY:
            self._refuse(413, f"the body is longer than {MAX_BODY} bytes")
            return
        exchange.method = self._parser.get_method().decode("latin-1")
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self.current is not None:
            self._queued.append(exchange)
        else:
            self.current = exchange
            self._listener.serve(exchange)

    # -- exchanges

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def exchange_done(self, close: bool) -> None:
        self.current = None
        if close or self._listener.closing:
            self.close()
        elif self._queued:
            self.current = self._queued.popleft()
            # Not from here: a long pipeline of requests answered at once would recurse as deep.
            self._listener.serve_soon(self.current)
        else:
            self.idle_since = self._listener.now()

    def close(self) -> None:
        """Ends the connection when what was written is out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        # Not through an exchange: one may be open on this connection, and closing is what tells it.
        body = msgspec.json.encode({"detail": message})
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}"
        self.write(f"{head}\r\nconnection: close\r\n\r\n".encode("latin-1") + body)
        self.close()


class Listener:
    """A listening socket and its connections; every complete request goes to `handler`."""

    def __init__(self, handler: Callable[[Exchange], None], *, keepalive_s: float) -> None:
        self._handler = handler
        self._keepalive_s = keepalive_s
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._empty: asyncio.Event | None = None
        self.connections: set[Connection] = set()
        self.closing = False
        self.port = 0
        self.now: Callable[[], float] = lambda: 0.0

    async def start(self, host: str, port: int) -> None:
        """Listens; raises `OSError` where the address cannot be had."""
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.closing = False
        self._server = await self._loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        self._arm()

    def serve(self, exchange: Exchange) -> None:
        try:
            self._handler(exchange)
        except Exception:
            # Raised further it would pass through the parser, which takes it for a client's bad bytes.
            _log.exception("simulator: %s %s failed", exchange.method, exchange.path)
            exchange.answer_json({"detail": "internal error of the simulator"}, status=500, close=True)

    def serve_soon(self, exchange: Exchange) -> None:
        if self._loop is not None:
            self._loop.call_soon(self.serve, exchange)

    def lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections and self._empty is not None:
            self._empty.set()

    async def stop(self, *, abrupt: bool) -> None:
        """Stops listening and ends every connection; `abrupt` resets them, else open exchanges were answered before."""
        if self._sweep is not None:
            self._sweep.cancel()
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if abrupt:
                connection.abort()
            else:
                connection.close()
        if self.connections:
            self._empty = asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), FLUSH_S)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
                await self._empty.wait()
            self._empty = None
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def _arm(self) -> None:
        if self._loop is not None:
            self._sweep = self._loop.call_later(self._keepalive_s * _SWEEP_SHARE, self._close_idle)

    def _close_idle(self) -> None:
        oldest = self.now() - self._keepalive_s
        for connection in list(self.connections):
            if connection.current is None and connection.idle_since < oldest:
                connection.close()
        self._arm()
