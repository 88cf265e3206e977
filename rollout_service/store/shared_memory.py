"""What several replicas share, without a database: for tests and simulations of replicas in one process.

What always holds: one transaction runs at a time, on a copy that becomes the content when it returns and is forgotten
when it raises, so that nobody sees half of it; it refuses what a database's schema refuses. So work is never run again
and never finds a group locked, which other stores may do. Every call suspends once, as a real store does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rollout_service.core.records import Batch
from rollout_service.core.shared import EngineWish, Overview, Replica, SeenReplica, SharedRun, Whole
from rollout_service.errors import StoreUnavailable
from rollout_service.store.memory import MemoryStore
from rollout_service.store.rivals import check_rival, check_room
from rollout_service.store.shared import Signal, Transaction
from rollout_service.store.shared_memory_content import SharedContent
from rollout_service.store.shared_memory_transaction import MemoryTransaction

P = TypeVar("P")
T = TypeVar("T")


class SharedMemory:
    """The content, and the handles of it. `broken`, where set, is why every call of every handle fails."""

    def __init__(self, max_staleness: int, clock: Callable[[], float] = time.time) -> None:
        self.broken: str | None = None
        self.max_staleness = max_staleness
        self.clock = clock
        self.content = SharedContent()
        self.lock = asyncio.Lock()
        """Held by the one transaction that runs."""
        self.inside: set[str] = set()
        """Names of the exclusive locks that are held."""
        self._stores: list[SharedMemoryStore] = []

    def store(self) -> SharedMemoryStore:
        """A handle for one replica, not opened yet."""
        store = SharedMemoryStore(self)
        self.add(store)
        return store

    def add(self, store: SharedMemoryStore) -> None:
        """Have signals reach `store`, a handle of this content."""
        self._stores.append(store)

    def tell(self, signals: Iterable[Signal], *, by: SharedMemoryStore) -> None:
        for signal in dict.fromkeys(signals):
            for store in self._stores:
                if store is by or store.pushes:
                    store.hear(signal)


class SharedMemoryStore(MemoryStore):
    """One replica's handle; a `SharedStore`.

    `pushes`, set to False, keeps other handles' signals away. `cut`: the replica cannot reach its database; whatever it
    asks for fails, and a transaction that runs meanwhile comes to nothing. `lost_answers` is how many of the next
    transactions take effect and raise StoreUnavailable all the same, as when the connection breaks during the commit.
    """

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory.max_staleness)
        self.cut = False
        self.lost_answers = 0
        self._memory = memory
        self._pushes = True
        self._on_signal: Callable[[Signal], None] | None = None

    @property
    def pushes(self) -> bool:
        return self._pushes and not self.cut and self._memory.broken is None

    @pushes.setter
    def pushes(self, pushes: bool) -> None:
        self._pushes = pushes

    def watch(self, on_signal: Callable[[Signal], None]) -> None:
        self._on_signal = on_signal

    def hear(self, signal: Signal) -> None:
        """Tell the watcher, if there is one, in a later step of the event loop."""
        if self._opened and self._on_signal is not None:
            asyncio.get_running_loop().call_soon(self._on_signal, signal)

    async def commit(self, batch: Batch) -> None:
        async with self._memory.lock:  # at once where no transaction runs: what is asked for later sees it
            self._commit(batch)
        await asyncio.sleep(0)

    async def transact(
        self, work: Callable[[Transaction], Awaitable[T]], *, alone: bool = False, exclusive: str | None = None
    ) -> T:
        self._check_open()
        async with self._memory.lock:
            return await self._transaction(work, alone=alone, name=exclusive)

    async def try_exclusively(
        self,
        name: str,
        prepare: Callable[[SharedRun, Whole], Awaitable[P]],
        work: Callable[[P, Transaction], Awaitable[T]],
    ) -> T | None:
        self._check_open()
        memory = self._memory
        if name in memory.inside:
            await asyncio.sleep(0)
            return None
        with _Inside(memory.inside, name):
            prepared = await prepare(memory.content.shared_run(), memory.content.whole())
            async with memory.lock:
                return await self._transaction(partial(work, prepared), alone=False, name=None)

    async def overview(self) -> Overview:
        self._check_open()
        content = self._memory.content
        oldest = min(content.outstanding, default=None)
        owners = [owner for owner, _ in content.claims.values()]
        seen = Overview(
            run=content.shared_run(),
            whole=content.whole(),
            oldest=None if oldest is None else content.read(content.outstanding[oldest]),
            leases=len(content.live),
            replicas=tuple(
                replace(replica, claims=owners.count(replica.replica.replica_id))
                for replica in sorted(content.replicas.values(), key=lambda replica: replica.started_at)
            ),
            now=self._memory.clock(),
        )
        await asyncio.sleep(0)
        return seen

    async def join(self, replica: Replica, *, lease_s: float) -> None:
        def entered(content: SharedContent, now: float) -> list[Signal]:
            for seen in content.replicas.values():
                other = seen.replica
                if seen.expires_at <= now or other.replica_id == replica.replica_id:
                    continue
                check_rival(replica, name=other.name, rules=other.rules, prompts=other.prompts, run="this run")
            content.replicas[replica.replica_id] = SeenReplica(
                replica=replica, started_at=now, seen_at=now, expires_at=now + lease_s
            )
            return []

        await self._change(entered)

    async def beat(self, replica: Replica, *, lease_s: float, signal: Signal | None = None) -> bool:
        known = False

        def seen(content: SharedContent, now: float) -> list[Signal]:
            nonlocal known
            before = content.replicas.get(replica.replica_id)
            if before is None:
                return []
            known = True
            content.replicas[replica.replica_id] = replace(
                before, replica=replica, seen_at=now, expires_at=now + lease_s
            )
            return [] if signal is None else [signal]

        await self._change(seen)
        return known

    async def wish(self, wish: EngineWish, *, beside: Collection[str] = (), most: int | None = None) -> EngineWish:
        kept = wish

        def wished(content: SharedContent, now: float) -> list[Signal]:
            nonlocal kept
            if most is not None:
                wanted = [each.engine_id for each in content.wishes.values() if each.wanted]
                check_room(wish.engine_id, {*wanted, *beside}, most)
            content.wished += 1
            before, limit = content.wishes.get(wish.engine_id), wish.max_inflight
            if limit is None and wish.wanted and before is not None and before.wanted:
                limit = before.max_inflight
            kept = replace(wish, number=content.wished, max_inflight=limit)
            content.wishes[wish.engine_id], content.wished_at[wish.engine_id] = kept, now
            return [Signal.ENGINES]

        await self._change(wished)
        return kept

    async def wishes(self) -> Sequence[EngineWish]:
        self._check_open()
        wishes = sorted(self._memory.content.wishes.values(), key=lambda wish: wish.number)
        await asyncio.sleep(0)  # as every call here, once
        return wishes

    async def remember_removal(self, number: int) -> None:
        def remembered(content: SharedContent, now: float) -> list[Signal]:
            for engine_id in content.removed_by(number):
                content.wished_at[engine_id] = now
            return []

        await self._change(remembered)

    async def forget_removal(self, number: int, *, after_s: float) -> None:
        def forgotten(content: SharedContent, now: float) -> list[Signal]:
            for engine_id in content.removed_by(number):
                if content.wished_at[engine_id] < now - after_s:
                    del content.wishes[engine_id], content.wished_at[engine_id]
            return []

        await self._change(forgotten)

    async def expel(self) -> Sequence[str]:
        names: list[str] = []

        def expelled(content: SharedContent, now: float) -> list[Signal]:
            over = [key for key, seen in content.replicas.items() if seen.expires_at <= now]
            names.extend(content.replicas[key].replica.name for key in over)
            # One that claimed while it was being expelled is known no more.
            strangers = {owner for owner, _ in content.claims.values() if owner is not None} - content.replicas.keys()
            forgotten = [content.forget_replica(key) for key in (*over, *sorted(strangers))]
            if not any(forgotten):
                return []
            content.row = replace(content.row, taken=content.row.taken + 1, revision=content.row.revision + 1)
            return [Signal.RUN, Signal.PENDING]

        await self._change(expelled)
        return names

    async def leave(self, replica_id: str) -> None:
        def left(content: SharedContent, _: float) -> list[Signal]:
            return [Signal.PENDING] if content.forget_replica(replica_id) else []

        await self._change(left)

    async def _change(self, change: Callable[[SharedContent, float], list[Signal]]) -> None:
        """Commit what `change` does to the content at a time, and tell what it returns."""

        async def work(transaction: MemoryTransaction) -> None:
            for signal in change(transaction.changed(), transaction.now):
                transaction.signal(signal)

        self._check_open()
        async with self._memory.lock:
            await self._transaction(work, alone=False, name=None)

    async def _transaction(
        self, work: Callable[[MemoryTransaction], Awaitable[T]], *, alone: bool, name: str | None
    ) -> T:
        """To be called with the lock."""
        memory = self._memory
        self._check_open()
        transaction = MemoryTransaction(
            memory.content, now=memory.clock(), alone=alone, max_staleness=memory.max_staleness, check=self._check_open
        )
        with nullcontext() if name is None else _Inside(memory.inside, name):
            await asyncio.sleep(0)
            try:
                result = await work(transaction)
            finally:
                transaction.over = True
            await asyncio.sleep(0)
            self._check_open()
        memory.content = transaction.content
        self.commits += 1
        memory.tell(transaction.signals, by=self)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("the connection broke during the commit; it may have taken effect")
        return result

    @property
    def _content(self) -> SharedContent:
        return self._memory.content

    def _apply(self, batch: Batch) -> None:
        content = self._memory.content.copy()
        content.change_whole(batch)
        self._memory.content = content

    def _check_open(self) -> None:
        super()._check_open()
        if self._memory.broken is not None:
            raise StoreUnavailable(self._memory.broken)
        if self.cut:
            raise StoreUnavailable("cannot reach the database")


class _Inside:
    """The exclusive lock `name`, taken by whoever holds the lock of all transactions."""

    def __init__(self, inside: set[str], name: str) -> None:
        self._inside, self._name = inside, name

    def __enter__(self) -> None:
        self._inside.add(self._name)

    def __exit__(self, *_: object) -> None:
        self._inside.discard(self._name)
