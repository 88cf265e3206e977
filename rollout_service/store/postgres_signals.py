"""What replicas tell each other by LISTEN and NOTIFY.

What always holds: nothing here is waited for by anybody's transaction; `pushes` is True only while a connection listens
that was seen to hear; signals that were lost while none did are told as `on_missed`. A signal is a hint: whoever needs
to know looks for itself from time to time, so one that cannot be sent is dropped.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from rollout_service.errors import StoreUnavailable
from rollout_service.store.postgres_server import DATABASE_ERRORS, Server, within

if TYPE_CHECKING:
    from rollout_service.store.postgres_server import Connection

log = structlog.get_logger(__name__)

CHANNEL: Final = "rollout_service"
TOGETHER_S: Final = 0.02
"""Between two sendings; a notification holds a lock over its commit that all share which notify."""

HEARD_S: Final = 1.0
"""A notification that has not come by then never comes: what lies between is a pooler."""

PING_S: Final = 10.0
"""Between two looks whether the listening connection is alive; its silence says nothing."""

PONG_S: Final = 2.0

RECONNECT_S: Final = (0.05, 2.0)
"""First and longest pause before the next try to listen."""

_FROM: Final = "\x1f"
"""Parts a payload from its sender."""

Send = Callable[[Sequence[str]], Awaitable[None]]
"""Notifies of payloads in a transaction; raises StoreUnavailable."""


class Signals:
    def __init__(self, server: Server, send: Send) -> None:
        self.pushes = False
        self.on_payload: Callable[[str], None] | None = None
        self.on_missed: Callable[[], None] | None = None
        self._server = server
        self._send = send
        self._id = secrets.token_hex(4)
        self._pending: dict[str, None] = {}
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        """Ends the listening connection that there is."""
        self._probe = asyncio.Event()

    async def open(self, connection: Connection) -> None:
        """Listen on `connection`, which is this object's from here on. Raises what the database raises."""
        self._probe, self._pending = asyncio.Event(), {}
        try:
            await self._listen(connection)
            await self._send([f"{_FROM}{self._id}"])
            try:
                await within(HEARD_S, self._probe.wait())
            except TimeoutError:
                detail = "a pooler in transaction mode lies between; what other replicas do is seen by polling"
                log.warning("signals_do_not_arrive", server=self._server.where, detail=detail)
                await connection.execute("BEGIN; UNLISTEN *; COMMIT")  # of whichever server connection it was
                await connection.close(timeout=PONG_S)
                return
        except BaseException:
            connection.terminate()
            raise
        self.pushes = True
        self._listener = asyncio.get_running_loop().create_task(self._keep(connection))

    async def close(self, *, patience_s: float) -> None:
        """What waits to be told is told, if that takes no longer than `patience_s`."""
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=patience_s)
        ending = [task for task in (self._sender, self._listener) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._sender = self._listener = None
        self.pushes = False

    def soon(self, payload: str) -> None:
        """Tell everybody, the own watcher at once."""
        loop = asyncio.get_running_loop()
        if self.on_payload is not None:
            loop.call_soon(self.on_payload, payload)
        self._pending[payload] = None
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send_pending())

    def renew(self) -> None:
        """Listen on a new connection: the server of this one is the primary no more."""
        self._lost.set()

    async def _send_pending(self) -> None:
        while self._pending:
            payloads, self._pending = [f"{payload}{_FROM}{self._id}" for payload in self._pending], {}
            try:
                await self._send(payloads)
            except StoreUnavailable as exc:
                log.debug("signals_not_sent", error=str(exc))  # those who wait look for themselves after a while
            await asyncio.sleep(TOGETHER_S)  # whatever is to be told meanwhile goes together

    async def _keep(self, connection: Connection | None) -> None:
        pause, lost = RECONNECT_S[0], False
        while True:
            error = ""
            try:
                if connection is None:
                    connection = await self._server.connect()
                    await self._listen(connection)
                    log.info("signals_arrive_again", server=self._server.where)
                    self.pushes, lost = True, False
                    if self.on_missed is not None:
                        self.on_missed()
                pause = RECONNECT_S[0]
                await self._until_lost(connection)
            except StoreUnavailable as exc:
                error = str(exc)
            except DATABASE_ERRORS as exc:
                error = self._server.told(exc)
            finally:
                self.pushes = False
                if connection is not None:
                    connection.terminate()
                    connection = None
            if not lost:  # once, however many tries it takes
                log.warning("signals_lost", server=self._server.where, error=error)
                lost = True
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads tries, keeps no secret
            pause = min(2 * pause, RECONNECT_S[1])

    async def _listen(self, connection: Connection) -> None:
        self._lost = lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        async with connection.transaction():
            await connection.add_listener(CHANNEL, self._heard)

    async def _until_lost(self, connection: Connection) -> None:
        while True:
            try:
                await within(PING_S, self._lost.wait())
            except TimeoutError:
                await connection.execute("SELECT 1", timeout=PONG_S)
            else:
                return

    def _heard(self, _connection: Any, _pid: int, _channel: str, told: object) -> None:
        payload, _, sender = str(told).partition(_FROM)
        if not payload:  # somebody tries whether it hears
            if sender == self._id:
                self._probe.set()
        elif sender != self._id and self.on_payload is not None:  # our own were told at once
            self.on_payload(payload)
