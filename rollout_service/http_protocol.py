"""The edge of HTTP: uvicorn's protocol with the bounds it leaves to a proxy in front.

What always holds, whoever calls and without any key: the head of a request has MAX_HEAD_BYTES at most (and what came
with its first byte in one read) and is complete within HEAD_S; of pipelined requests no more are read while some wait,
and a connection with more than MAX_PIPELINED of them is cut; connections beyond `most` are closed at once, so that
descriptors are left for engines and the store.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers; proxies and browsers send 8 to 16 KiB at most."""
HEAD_S = 10.0
"""For a connection's first byte too: who opens one has something to say."""
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/problem+json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)
TOO_LARGE_BODY = (
    b'{"type":"/problems/head-too-large","title":"Head too large","status":431,'
    b'"detail":"request line and headers may have 65536 bytes"}'
)
RESERVE = 256
"""Descriptors for what is neither a caller nor an engine: store, logs, reward workers, probes."""
MAX_PIPELINED = 32
"""Nobody who pipelines sends so many ahead of the answers."""
LEAST = 64
"""Connections there is always room for."""

log = structlog.get_logger(__name__)


class BoundedHttp(HttpToolsProtocol):
    """One connection. `most` is set by `bounded`."""

    most = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._begun_now = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begun_now = False
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if not self._begun_now:  # else most of `data` may belong to the request before
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop_timer()
            self.transport.write(TOO_LARGE % (len(TOO_LARGE_BODY), TOO_LARGE_BODY))
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._begun_now, self._head_bytes = True, True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # what was read already comes first; else a caller's requests pile up in memory

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bounded(most: int) -> type[BoundedHttp]:
    """The protocol for at most `most` connections at once."""
    return type("BoundedHttp", (BoundedHttp,), {"most": most})


def connections_for(engine_requests: int) -> int:
    """How many callers' connections there is room for beside `engine_requests` to engines; raises the soft limit of
    descriptors to the hard one first."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or soft == resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:
            log.info("descriptor_limit_not_raised", soft=soft, hard=hard, error=str(error))
    if soft == resource.RLIM_INFINITY:
        soft = 1_000_000
    room = soft - engine_requests - RESERVE
    if room < LEAST:
        log.warning(
            "few_descriptors",
            limit=soft,
            engine_requests=engine_requests,
            detail="ulimit -n is low for dispatch.max_inflight_rollouts: callers or engines may be refused",
        )
    return max(LEAST, min(room, 100_000))
