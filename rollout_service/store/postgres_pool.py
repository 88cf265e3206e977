"""Connections that are used again, by one transaction at a time.

What always holds: at most `size` are in use or kept; one that is given back is in no transaction, and one that anybody
doubts is closed and never used again; what waits for a connection waits for a bounded time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from rollout_service.errors import StoreUnavailable
from rollout_service.store.postgres_server import DATABASE_ERRORS, Server, within

if TYPE_CHECKING:
    from rollout_service.store.postgres_server import Connection

KEPT_S: Final = 240.0
"""An idle connection is used no more after that: firewalls forget those of five minutes and more, and say nothing."""

CLOSE_S: Final = 0.3
"""For the server to hear that a statement is cancelled and the connection over; then it is cut."""

CUT_S: Final = 0.1
"""For those whose connection was cut to notice it."""


class Pool:
    """`wait_s` is how long `take` waits for a connection that others use."""

    def __init__(self, server: Server, *, size: int, wait_s: float) -> None:
        self._server = server
        self._size = size
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(size)
        self._idle: list[tuple[Connection, float]] = []
        """With the time since when; the one that was used last is used first, so that the others grow old."""
        self._busy: set[Connection] = set()
        self._doubted: set[Connection] = set()
        """In use, and not to be kept."""
        self._quiet = asyncio.Event()
        """Nothing is in use."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self) -> tuple[Connection, bool]:
        """A connection and whether it is new; to be given to `give` or `discard`. Raises StoreUnavailable."""
        try:
            await within(self._wait_s, self._free.acquire())
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"{self._server.where}: all {self._size} connections were busy for {self._wait_s:g} s"
            ) from exc
        try:
            connection = self._kept()
            new = connection is None
            if connection is None:
                connection = await self._server.connect()
                if self._closed:  # meanwhile
                    connection.terminate()
                    self._check_open()
        except BaseException:
            self._free.release()
            raise
        self._busy.add(connection)
        self._quiet.clear()
        return connection, new

    def give(self, connection: Connection) -> None:
        """Keep it for others."""
        if connection in self._doubted or connection.is_closed() or self._closed:
            self.discard(connection)
            return
        self._idle.append((connection, time.monotonic()))
        self._release(connection)

    def discard(self, connection: Connection) -> None:
        """Close it; what runs on it is cancelled. Its place is free once that is done."""

        async def closed() -> None:
            try:
                await _close(connection)
            finally:
                self._release(connection)

        self._spawn(closed())

    def drop(self) -> None:
        """Keep none of those there are, neither idle ones nor, once they are given back, busy ones."""
        self._doubted |= self._busy
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            self._spawn(_close(connection))

    async def close(self, *, patience_s: float) -> None:
        """Whoever is in a transaction has `patience_s` to end it. Ends within `CLOSE_S + CUT_S` more."""
        self._closed = True
        self.drop()
        for wait_s in (patience_s, CUT_S):
            if self._busy:
                try:
                    await within(wait_s, self._quiet.wait())
                except TimeoutError:
                    for connection in self._busy:
                        connection.terminate()  # whoever waits for its answer is told so
        if self._closing:
            await asyncio.wait(self._closing)

    def _release(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._doubted.discard(connection)
        if not self._busy:
            self._quiet.set()
        self._free.release()

    def _kept(self) -> Connection | None:
        self._check_open()
        while self._idle:
            connection, since = self._idle.pop()
            if not connection.is_closed() and time.monotonic() - since < KEPT_S:
                return connection
            self._spawn(_close(connection))
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is not open")

    def _spawn(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close(connection: Connection) -> None:
    try:
        await connection.close(timeout=CLOSE_S)
    except DATABASE_ERRORS:  # it is cut now, which is all that was wanted
        connection.terminate()
