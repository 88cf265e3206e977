"""The embedded store: one SQLite file, written by one thread.

What always holds: `commit` returns after the batch is synced to disk (write-ahead log, synchronous FULL); nothing on
the event loop opens, reads, commits or syncs; an error of the medium leaves the last commit as it was.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, Snapshot, StoredPrompt
from rollout_service.errors import StoreUnavailable
from rollout_service.store import sqlite_read, sqlite_thread
from rollout_service.store.sqlite_file import BUSY_S

T = TypeVar("T")


class SqliteStore:
    """A `Store` in the file `path`; the folder must exist, the file is made.

    Cancelling a call gives up the answer, not the call: a commit that was asked for takes effect.
    """

    def __init__(self, path: Path, *, max_staleness: int, busy_s: float = BUSY_S) -> None:
        self.path = path
        self._max_staleness = max_staleness
        self._busy_s = busy_s
        self._threads: sqlite_thread.SqliteThreads | None = None

    async def open(self) -> None:
        if self._threads is not None:
            raise RuntimeError("the store is open")
        threads = sqlite_thread.SqliteThreads(
            self.path, max_staleness=self._max_staleness, busy_s=self._busy_s, loop=asyncio.get_running_loop()
        )
        opened = _future()
        self._threads = threads
        threads.start()
        threads.put(sqlite_thread.Open(opened))
        try:
            await opened
        except BaseException:
            self._threads = None
            if opened.done() and not opened.cancelled():
                threads.join()
            else:  # the wait was cancelled: the thread still opens, and must let go again
                threads.put(sqlite_thread.Close(_future()))
            raise

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is None:
            return
        closed = _future()
        threads.put(sqlite_thread.Close(closed))
        await closed
        threads.join()

    async def load(self) -> Snapshot:
        future: asyncio.Future[Snapshot] = _future()
        return await self._ask(sqlite_thread.Load(future), future)

    async def commit(self, batch: Batch) -> None:
        future: asyncio.Future[None] = _future()
        await self._ask(sqlite_thread.Commit(batch, future), future)

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        return await self._read(lambda connection: sqlite_read.find_prompts(connection, keys))

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Group]:
        return await self._read(lambda connection: sqlite_read.groups(connection, seqs))

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        return await self._read_much(lambda connection: sqlite_read.payloads(connection, seqs))

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        return await self._read_much(lambda connection: sqlite_read.prompts(connection, seqs))

    async def list_groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        return await self._read_much(lambda connection: sqlite_read.list_groups(connection, states, after, limit))

    async def ended_since(self, ends: int) -> Sequence[int]:
        return await self._read_much(lambda connection: sqlite_read.ended_since(connection, ends))

    async def lease(self, lease_id: str) -> Lease | None:
        return await self._read(lambda connection: sqlite_read.lease(connection, lease_id))

    async def lease_by_request(self, request_id: str) -> Lease | None:
        return await self._read(lambda connection: sqlite_read.lease_by_request(connection, request_id))

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """For what takes microseconds: answered by the writing thread in its turn."""
        future: asyncio.Future[T] = _future()
        return await self._ask(sqlite_thread.SmallRead(read, future), future)

    async def _read_much(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """For what may be megabytes: seen as of its turn, answered beside the commits that follow."""
        future: asyncio.Future[T] = _future()
        return await self._ask(sqlite_thread.LargeRead(read, future), future)

    async def _ask(self, job: sqlite_thread.Job, future: asyncio.Future[T]) -> T:
        if self._threads is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        self._threads.put(job)
        return await future


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()
