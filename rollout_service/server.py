"""uvicorn with our order of starting and ending, around parts that are given.

What always holds: the address is taken before an engine is contacted, and nothing is answered before every part has
started; SIGTERM and SIGINT first end the work (waiting lease calls are answered, in flight is aborted, state is
committed) and then the server; the process has ended within 10 seconds of the first signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog
import uvicorn

from rollout_service import collector
from rollout_service.app import Parts, create_app
from rollout_service.errors import ConfigError
from rollout_service.http_protocol import bounded, connections_for
from rollout_service.settings import Settings

KEEP_ALIVE_S = 75
"""Longer than a trainer's step between two calls on one connection, and than the longest poll."""
GRACE_S = 1
"""For answers still on their way once every waiting call was answered."""
LAST_RESORT_S = 9.5
"""Whoever stops us kills at 10 s or later; ending by ourselves keeps that out of their log."""

log = structlog.get_logger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet. Raises ConfigError where the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"server: cannot listen on {host} port {port}: {error.strerror or error}") from None
    return sock


def serve(settings: Settings, parts: Parts, sock: socket.socket) -> None:
    """Start `parts`, answer on `sock`, return after SIGTERM or SIGINT. Raises ConfigError."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, parts, sock))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":  # uvloop is not made for it
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(settings: Settings, parts: Parts, sock: socket.socket) -> None:
    stop = _stop_signal()
    starting = asyncio.create_task(parts.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop-signal")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        server = Server(settings, parts)
        stopping.add_done_callback(lambda _: server.end())
        await _listening(server, sock)
    finally:
        stopping.cancel()
        await parts.stop()
        sock.close()
    log.info("stopped")


async def _listening(server: Server, sock: socket.socket) -> None:
    try:
        await server.serve(sockets=[sock])
    except OSError as error:
        if server.started:
            raise
        raise ConfigError(f"server: cannot listen on {_url(sock)}: {error.strerror or error}") from None


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; from then on the process ends, whatever hangs."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def received(name: str) -> None:
        if stop.is_set():
            return
        log.info("stopping", signal=name)
        stop.set()
        timer = threading.Timer(LAST_RESORT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, received, signum.name)
    return stop


class Server(uvicorn.Server):
    """Ends the work before it ends the connections."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._parts = parts
        super().__init__(
            uvicorn.Config(
                create_app(settings, parts),
                http=bounded(connections_for(settings.dispatch.max_inflight_rollouts)),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    def end(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's: `_stop_signal` has them since before the parts started."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        collector.tame()
        log.info("listening", url=_url(sockets[0]) if sockets else None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._parts.stop_work()
        await super().shutdown(sockets)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
