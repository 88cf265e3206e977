"""Transactions on PostgreSQL that get along with whatever happens to it.

What always holds: what `run` returned from is committed, and durable unless `sync` is False; nothing of one that raised
happened, unless it raised StoreUnavailable (or was cancelled) while its commit was on the way; a call that failed
leaves nothing behind that the next one meets. Nothing depends on a session, so that a pooler in transaction mode may
stand between. A replica that hangs in a transaction is put out of it by the server before those who wait for its locks
give up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store.postgres_pool import Pool
from rollout_service.store.postgres_server import DATABASE_ERRORS, Server, Trouble, trouble
from rollout_service.store.postgres_signals import CHANNEL, Signals

if TYPE_CHECKING:
    from rollout_service.store.postgres_server import Connection

T = TypeVar("T")

ATTEMPTS: Final = 5
"""Of a transaction that collides with others."""

PAUSE_S: Final = 0.004
"""Longest pause after the first collision; twice as long after each further one. Random, so that those who met part."""

PATIENCE_S: Final = 0.15
"""What `close` gives to signals, then to transactions, that are on their way."""

_LOOK: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_COMMIT: Final = "SET LOCAL statement_timeout = 0; COMMIT"
"""A timeout while a commit waits for a standby would make it a success with a warning. It is left to the client's own
timeout, which is an error."""


class _Stale(Exception):
    """A kept connection was of no use at the first word; nothing was done on it."""


class Connections:
    """Connections to the database at `url`; `pool_size` transactions run at once, and the others wait.

    `statement_timeout_s` bounds each statement, each wait for a lock and, half as long, each pause in a transaction.
    """

    def __init__(self, url: str, *, pool_size: int, statement_timeout_s: float) -> None:
        self._server = Server(url, statement_timeout_s=statement_timeout_s)
        self._pool_size = pool_size
        self._statement_timeout_s = statement_timeout_s
        milliseconds = max(1, round(1000 * statement_timeout_s))
        self.pause_limit = f"SET LOCAL idle_in_transaction_session_timeout = {max(1, milliseconds // 2)}"
        """The longest pause within a transaction, for one that had another."""
        limits = (
            ("statement_timeout", milliseconds),
            ("lock_timeout", milliseconds),
            ("tcp_user_timeout", milliseconds),  # a client that takes no answer holds its locks no longer either
        )
        self._limits = "; ".join((self.pause_limit, *(f"SET LOCAL {setting} = {value}" for setting, value in limits)))
        self._sync = ""
        self._pools: tuple[Pool, Pool] | None = None
        """For transactions; of one connection, reserved."""
        self._signals = Signals(self._server, self._notify)

    async def open(self) -> None:
        """Raises ConfigError where the database cannot be reached or refuses."""
        if self._pools is not None:
            raise RuntimeError("the connections are open")
        self._server.pooled = True
        try:
            connection = await self._server.connect()
        except StoreUnavailable as exc:
            raise ConfigError(f"store.url: {exc}") from exc
        self._pools = self._pool(self._pool_size), self._pool(1)
        try:
            await self._look_around(connection)
            await self._signals.open(connection)
        except BaseException as exc:
            connection.terminate()
            await self.close()
            if isinstance(exc, DATABASE_ERRORS):
                raise ConfigError(f"store.url: {self._server.told(exc)}") from exc
            if isinstance(exc, StoreUnavailable):
                raise ConfigError(f"store.url: {exc}") from exc
            raise

    async def close(self) -> None:
        """Ends within a second, whatever the server does; safe to call twice."""
        if self._pools is None:
            return
        pools = self._pools
        await self._signals.close(patience_s=PATIENCE_S)
        self._pools = None
        await asyncio.gather(*(pool.close(patience_s=PATIENCE_S) for pool in pools))

    @property
    def pushes(self) -> bool:
        """Whether notifications of others arrive."""
        return self._signals.pushes

    def watch(self, on_payload: Callable[[str], None], on_missed: Callable[[], None] | None = None) -> None:
        """Have `on_payload` called on the event loop for every notification, and `on_missed` after a time in which some
        may have been lost."""
        self._signals.on_payload, self._signals.on_missed = on_payload, on_missed

    def notify_soon(self, payload: str) -> None:
        """Notify everybody of `payload` in a moment, in a transaction of its own; the own watcher hears at once.

        The same payload is told once where it was to be told several times in that moment.
        """
        if self._pools is not None:
            self._signals.soon(payload)

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        *,
        first: str | None = None,
        last: Callable[[T], str] | None = None,
        sync: bool = True,
        reserved: bool = False,
    ) -> T:
        """Run `work` in one transaction and commit it; what it raises undoes it and is raised.

        `first`, SQL without arguments, comes before it in the round trip that begins the transaction; such SQL that
        `last` makes of what `work` returned goes with the commit. `sync`: durable when this returns. `reserved`: on a
        connection that other transactions cannot keep busy. `work` is run again from the start where the database asks
        for it. Raises StoreUnavailable, for a ConnectionError or TimeoutError of `work` too: they are taken for the
        connection's.
        """
        durability = self._sync if sync else "; SET LOCAL synchronous_commit = off"
        begin = f"BEGIN; {self._limits}{durability}{'' if first is None else f'; {first}'}"

        def end(result: T) -> str:
            more = "" if last is None else last(result)
            return f"{more}; {_COMMIT}" if more else _COMMIT

        return await self._transact(work, begin, end, reserved=reserved)

    async def look(self, work: Callable[[Connection], Awaitable[T]], *, first: str | None = None) -> T:
        """`run` for reading only: everything `work` reads is of one moment."""
        begin = f"{_LOOK}; {self._limits}{'' if first is None else f'; {first}'}"
        return await self._transact(work, begin, lambda _: "COMMIT", reserved=False)

    def _pool(self, size: int) -> Pool:
        return Pool(self._server, size=size, wait_s=self._statement_timeout_s)

    async def _look_around(self, connection: Connection) -> None:
        """Learn what the connections will have to know, of the first one."""
        async with connection.transaction():
            row = await connection.fetchrow(
                "SELECT pg_backend_pid() AS pid, current_setting('synchronous_commit') AS sync"
            )
        assert row is not None  # noqa: S101 - a SELECT without FROM has one row
        self._server.pooled = row["pid"] != connection.get_server_pid()
        # Anything but off is at least as durable as one server can be, and the operator's choice.
        self._sync = "; SET LOCAL synchronous_commit = on" if row["sync"] == "off" else ""

    async def _transact(
        self, work: Callable[[Connection], Awaitable[T]], begin: str, end: Callable[[T], str], *, reserved: bool
    ) -> T:
        attempt, met = 0, ""
        while attempt < ATTEMPTS:
            if self._pools is None:
                raise StoreUnavailable("the store is not open")
            pool = self._pools[reserved]
            connection, new = await pool.take()
            try:
                return await self._once(pool, connection, work, begin, end, new=new)
            except _Stale:
                self._drop()  # so that it happens once, however many were kept
                continue
            except DATABASE_ERRORS as exc:
                met = self._server.told(exc)
                asks = trouble(exc, connection)
                if asks in (Trouble.LOST, Trouble.READ_ONLY):
                    self._drop()
                if asks is Trouble.READ_ONLY:
                    self._signals.renew()
                elif asks is not Trouble.COLLISION:
                    raise StoreUnavailable(met) from exc
            await asyncio.sleep(random.uniform(0, PAUSE_S * 2**attempt))  # noqa: S311 - parts those who met
            attempt += 1
        raise StoreUnavailable(f"{met} ({ATTEMPTS} times in a row)")

    async def _once(
        self,
        pool: Pool,
        connection: Connection,
        work: Callable[[Connection], Awaitable[T]],
        begin: str,
        end: Callable[[T], str],
        *,
        new: bool,
    ) -> T:
        """One attempt on `connection`, which is back in the pool or closed after it."""
        clean = False
        try:
            try:
                await connection.execute(begin)
            except DATABASE_ERRORS as exc:
                if not new and connection.is_closed():
                    raise _Stale from exc
                raise
            result = await work(connection)
            await self._commit(connection, end(result))
            clean = True
        except BaseException as exc:
            clean = await self._undone(connection, exc)
            raise
        finally:
            if clean:
                pool.give(connection)
            else:
                pool.discard(connection)
        return result

    async def _commit(self, connection: Connection, commit: str) -> None:
        try:
            await connection.execute(commit)
        except DATABASE_ERRORS as exc:
            if trouble(exc, connection) is not Trouble.LOST:
                raise  # the database says itself that it came to nothing
            self._drop()
            raise StoreUnavailable(f"{self._server.told(exc)}, during a commit; it may have taken effect") from exc

    async def _undone(self, connection: Connection, exc: BaseException) -> bool:
        """Whether the connection is in no transaction any more, for sure."""
        if connection.is_closed() or isinstance(exc, asyncio.CancelledError | TimeoutError):
            return False  # an answer may still be on its way: closing it undoes the transaction just as well
        try:
            if connection.is_in_transaction():
                await connection.execute("ROLLBACK")
        except DATABASE_ERRORS:
            return False
        return not connection.is_in_transaction()

    def _drop(self) -> None:
        for pool in self._pools or ():
            pool.drop()

    async def _notify(self, payloads: Sequence[str]) -> None:
        await self.run(_nothing, first="; ".join(map(notification, payloads)), sync=False)


def notification(payload: str) -> str:
    """SQL without arguments that notifies of `payload`, which stands in it as hexadecimal digits whatever it is."""
    return f"SELECT pg_notify('{CHANNEL}', convert_from(decode('{payload.encode().hex()}', 'hex'), 'UTF8'))"


async def _nothing(_: Connection) -> None:
    """Work of which all is in `first`."""
