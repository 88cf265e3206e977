"""The store that replicas share: one PostgreSQL database, one run.

What always holds: what `commit` and `transact` return from is durable (synchronous_commit); the reads and commits of
one `Store` object take effect in the order they were asked for; nothing on the event loop but waiting, and coding of
small payloads. Everything is scoped to transactions, so that a pooler in transaction mode may stand between. No
message shows a password.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, Snapshot, StoredPrompt
from rollout_service.core.shared import EngineWish, Overview, Replica, SharedRun, Whole
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import postgres_queries as sql
from rollout_service.store import postgres_read as read
from rollout_service.store import postgres_schema
from rollout_service.store.postgres_connections import Connections, notification
from rollout_service.store.postgres_transaction import PostgresTransaction
from rollout_service.store.postgres_write import BatchWriter, refusals, write_ends, write_run, write_wish
from rollout_service.store.rivals import check_rival, check_room
from rollout_service.store.shared import Signal, Transaction

if TYPE_CHECKING:
    from asyncpg import Connection, Record

P = TypeVar("P")
T = TypeVar("T")

_PLAIN_URL: Final = re.compile(r"(postgres(?:ql)?)://(?:[^@?/]*@)?([^@?/]*)(/[^@?]*)?(?:\?[^@]*)?")

URGENT: Final = frozenset({Signal.RUN, Signal.ENFORCED})
"""Told in the transaction itself, so that they come with its commit. The others are told a moment later and together:
a notification holds a lock over its commit that all share which notify."""


def shown(url: str) -> str:
    """`url` without user, password and options; without anything where it is written so that they cannot be told."""
    plain = _PLAIN_URL.fullmatch(url)
    return "postgresql://…" if plain is None else f"{plain[1]}://{plain[2]}{plain[3] or ''}"


class Turns:
    """Lets commits wait for what was asked for before them, and reads for the commits among it."""

    def __init__(self) -> None:
        self._commit: asyncio.Future[None] | None = None
        self._reads: set[asyncio.Future[None]] = set()
        """Since that commit, and not over."""

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._commit
        self._reads.add(done)
        try:
            if before is not None:
                await asyncio.wait([before])
            yield
        finally:
            self._reads.discard(done)
            done.set_result(None)

    @asynccontextmanager
    async def commit(self) -> AsyncIterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = [*self._reads, *([] if self._commit is None else [self._commit])]
        self._commit, self._reads = done, set()
        try:
            if before:
                await asyncio.wait(before)
            yield
        finally:
            if self._commit is done:
                self._commit = None
            done.set_result(None)


class PostgresStore:
    """A `Store` and `SharedStore` in the database of `url` (libpq's form; what is missing comes from PG… variables).

    `pool_size`: transactions at the same time. `statement_timeout_s`: the longest a statement or a wait for a lock may
    take; a pause within a transaction half of it. Cancelling `commit` gives up the answer, not the commit.
    """

    def __init__(self, url: str, *, max_staleness: int, pool_size: int = 8, statement_timeout_s: float = 10.0) -> None:
        self.url = url
        self.name = shown(url)
        """For people."""
        self._max_staleness = max_staleness
        self._pool_size = pool_size
        self._statement_timeout_s = statement_timeout_s
        self._connections: Connections | None = None
        self._turns = Turns()
        self._asked: set[asyncio.Future[Any]] = set()
        """What `close` waits for."""
        self._failure: str | None = None
        """Why `commit` refuses until the next load."""
        self._watcher: Callable[[Signal], None] | None = None

    # --- open and closed

    async def open(self) -> None:
        if self._connections is not None:
            raise RuntimeError("the store is open")
        connections = Connections(self.url, pool_size=self._pool_size, statement_timeout_s=self._statement_timeout_s)
        connections.watch(self._hear, self._hear_everything)
        await connections.open()
        try:
            await postgres_schema.migrate(connections, self.name)
        except BaseException as exc:
            await connections.close()
            if isinstance(exc, StoreUnavailable):
                raise ConfigError(f"store.url: {exc}") from exc
            raise
        self._turns, self._failure = Turns(), None
        self._connections = connections

    async def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is None:
            return
        if self._asked:
            await asyncio.wait(self._asked)
        await connections.close()

    # --- a store

    async def load(self) -> Snapshot:
        async def loaded(connection: Connection[Record]) -> Snapshot:
            found = await read.snapshot(connection)
            self._failure = None
            return found

        return await self._look(loaded)

    async def commit(self, batch: Batch) -> None:
        await self._kept(self._commit(self._open(), batch))

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        return await self._look(lambda connection: read.find_prompts(connection, keys))

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Group]:
        return await self._look(lambda connection: read.groups(connection, seqs))

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        return await self._look(lambda connection: read.payloads(connection, seqs))

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        return await self._look(lambda connection: read.prompts(connection, seqs))

    async def list_groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        return await self._look(lambda connection: read.list_groups(connection, states, after, limit))

    async def lease(self, lease_id: str) -> Lease | None:
        return await self._look(lambda connection: read.lease(connection, sql.READ_LEASE, lease_id))

    async def lease_by_request(self, request_id: str) -> Lease | None:
        return await self._look(lambda connection: read.lease(connection, sql.READ_LEASE_BY_REQUEST, request_id))

    async def ended_since(self, ends: int) -> Sequence[int]:
        return await self._look(lambda connection: read.ended_since(connection, ends))

    # --- a shared store

    @property
    def pushes(self) -> bool:
        return self._connections is not None and self._connections.pushes

    def watch(self, on_signal: Callable[[Signal], None]) -> None:
        self._watcher = on_signal

    async def transact(
        self, work: Callable[[Transaction], Awaitable[T]], *, alone: bool = False, exclusive: str | None = None
    ) -> T:
        lock = sql.LOCK_RUN if alone else sql.SHARE_RUN

        async def in_turn(connection: Connection[Record]) -> tuple[T, set[Signal]]:
            if exclusive is not None:  # before the run's lock: whoever waits here keeps nobody from being alone
                await connection.fetchval(sql.LOCK_NAME, exclusive)
                await connection.execute(lock)
            return await self._transacted(connection, work)

        first = f"{sql.PLAN};{lock}" if exclusive is None else sql.PLAN
        result, signals = await self._kept(
            self._open().run(in_turn, first=first, last=lambda done: _told(done[1])), shielded=False
        )
        self._tell(signals)
        return result

    async def try_exclusively(
        self,
        name: str,
        prepare: Callable[[SharedRun, Whole], Awaitable[P]],
        work: Callable[[P, Transaction], Awaitable[T]],
    ) -> T | None:
        async def if_free(connection: Connection[Record]) -> tuple[T | None, set[Signal]]:
            if not await connection.fetchval(sql.TRY_NAME, name):
                return None, set()
            run, whole, _ = await read.run(connection)
            await connection.execute(sql.PREPARING)
            prepared = await prepare(run, whole)
            await connection.execute(f"{self._open().pause_limit}; {sql.SHARE_RUN}")
            return await self._transacted(connection, partial(work, prepared))

        result, signals = await self._kept(
            self._open().run(if_free, first=sql.PLAN, last=lambda done: _told(done[1])), shielded=False
        )
        self._tell(signals)
        return result

    async def overview(self) -> Overview:
        return await self._look(read.overview)

    async def join(self, replica: Replica, *, lease_s: float) -> None:
        async def joined(connection: Connection[Record]) -> None:
            await connection.fetchval(sql.LOCK_NAME, "join")
            for row in await connection.fetch(sql.READ_RIVALS, replica.replica_id):
                check_rival(replica, **row, run=f"store {self.name}")
            await connection.execute(sql.JOIN, *read.replica_row(replica), lease_s)

        await self._kept(self._open().run(joined, first=sql.PLAN), shielded=False)

    async def beat(self, replica: Replica, *, lease_s: float, signal: Signal | None = None) -> bool:
        signals = set() if signal is None else {signal}

        async def beaten(connection: Connection[Record]) -> bool:
            return await connection.fetchval(sql.BEAT, *read.replica_row(replica), lease_s) is not None

        known = await self._kept(
            self._open().run(beaten, first=sql.PLAN, last=lambda known: _told(signals) if known else "", reserved=True),
            shielded=False,
        )
        if known:
            self._tell(signals)
        return known

    async def wish(self, wish: EngineWish, *, beside: Collection[str] = (), most: int | None = None) -> EngineWish:
        async def wished(connection: Connection[Record]) -> EngineWish:
            # The numbers are in the order of the commits: nobody may look and see a later one alone.
            await connection.fetchval(sql.LOCK_NAME, "engines")
            if most is not None:
                wanted = [row["engine_id"] for row in await connection.fetch(sql.READ_WANTED)]
                check_room(wish.engine_id, {*wanted, *beside}, most)
            return await write_wish(connection, wish)

        kept = await self._kept(self._open().run(wished, first=sql.PLAN), shielded=False)
        self._tell({Signal.ENGINES})
        return kept

    async def wishes(self) -> Sequence[EngineWish]:
        return await self._look(read.wishes)

    async def remember_removal(self, number: int) -> None:
        await self._execute(sql.REMEMBER_REMOVAL, number)

    async def forget_removal(self, number: int, *, after_s: float) -> None:
        await self._execute(sql.FORGET_REMOVAL, number, after_s)

    async def expel(self) -> Sequence[str]:
        async def expelled(connection: Connection[Record]) -> tuple[list[str], set[Signal]]:
            overdue = await connection.fetch(sql.LOCK_OVERDUE)
            gone = [row["replica_id"] for row in overdue]
            forfeit = [row["seq"] for row in await connection.fetch(sql.LOCK_FORFEIT, gone)]
            if not overdue and not forfeit:
                return [], set()
            await connection.execute(sql.DISOWN, forfeit)
            await connection.execute(sql.FORGET_REPLICAS, gone)
            await connection.execute(sql.COUNT_TAKEN)
            return [row["name"] for row in overdue], {Signal.RUN, Signal.PENDING}

        first = f"{sql.PLAN};{sql.SHARE_RUN}"
        names, signals = await self._kept(
            self._open().run(expelled, first=first, last=lambda done: _told(done[1])), shielded=False
        )
        self._tell(signals)
        return names

    async def leave(self, replica_id: str) -> None:
        async def left(connection: Connection[Record]) -> None:
            owned = [row["seq"] for row in await connection.fetch(sql.LOCK_OWNED, replica_id)]
            await connection.execute(sql.DISOWN, owned)
            await connection.execute(sql.FORGET_REPLICAS, [replica_id])

        await self._kept(self._open().run(left, first=f"{sql.PLAN};{sql.SHARE_RUN}"), shielded=False)
        self._tell({Signal.PENDING})

    # --- how

    def _open(self) -> Connections:
        if self._connections is None:
            raise StoreUnavailable(f"the store {self.name} is not open")
        return self._connections

    async def _kept(self, work: Coroutine[Any, Any, T], *, shielded: bool = True) -> T:
        """Have `close` wait for `work`; `shielded`: it goes on when the wait for it is given up."""
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await (asyncio.shield(task) if shielded else task)

    async def _commit(self, connections: Connections, batch: Batch) -> None:
        async def written(connection: Connection[Record]) -> None:
            with refusals(raced=frozenset()):  # alone: nobody else can have taken a key meanwhile
                writer = BatchWriter(connection, max_staleness=self._max_staleness, numbered=False)
                if batch.run is not None:
                    await write_run(connection, batch.run)
                await writer.write(batch, owner=None)
                if batch.run is not None:
                    await write_ends(connection, batch.run)

        async with self._turns.commit():
            if self._failure is not None:
                raise StoreUnavailable(f"{self._failure}; nothing is committed until the store was loaded again")
            try:
                await connections.run(written, first=f"{sql.PLAN};{sql.LOCK_RUN}")
            except StoreUnavailable as exc:
                self._failure = str(exc)
                raise

    async def _execute(self, statement: str, *arguments: object) -> None:
        """In a transaction of its own."""

        async def executed(connection: Connection[Record]) -> None:
            await connection.execute(statement, *arguments)

        await self._kept(self._open().run(executed, first=sql.PLAN), shielded=False)

    async def _look(self, work: Callable[[Connection[Record]], Coroutine[Any, Any, T]]) -> T:
        connections = self._open()

        async def looked() -> T:
            async with self._turns.read():
                return await connections.look(work, first=sql.PLAN)

        return await self._kept(looked(), shielded=False)

    async def _transacted(
        self, connection: Connection[Record], work: Callable[[Transaction], Awaitable[T]]
    ) -> tuple[T, set[Signal]]:
        transaction = PostgresTransaction(connection, max_staleness=self._max_staleness)
        await transaction.begin()
        return await work(transaction), transaction.signals

    def _tell(self, signals: Collection[Signal]) -> None:
        """What a durable transaction signalled: this store's own watcher hears of it at once."""
        if self._connections is None:
            return
        for signal in signals:
            if signal in URGENT:
                self._hear(signal.value)
            else:
                self._connections.notify_soon(signal.value)

    def _hear(self, payload: str) -> None:
        if self._watcher is not None and payload in set(Signal):
            self._watcher(Signal(payload))

    def _hear_everything(self) -> None:
        """Some may have been lost."""
        for signal in Signal:
            self._hear(signal.value)


def _told(signals: Collection[Signal]) -> str:
    """SQL that tells the urgent ones."""
    return "; ".join(notification(signal.value) for signal in signals if signal in URGENT)
