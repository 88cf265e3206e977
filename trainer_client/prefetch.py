"""Leases asked for while the trainer computes.

What always holds:

- Every lease taken is acked, given back, or known to be lost; leaving the block leaves none behind.
- A lease that waits or is being trained is renewed at half of its time.
- No group is handed over that the newest version known here makes stale, or that a reset made void.
- The lease in hand is acked before the next one is waited for: the service may be waiting for that ack to know that
  nothing more will come.
- Errors reach the consumer after the leases that were taken before them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from trainer_client.errors import ClientError, Conflict, NotFound, Problem
from trainer_client.types import Lease, LeaseStatus

if TYPE_CHECKING:
    from trainer_client.client import AsyncRolloutClient
    from trainer_client.core import Core

logger = logging.getLogger("trainer_client")

T = TypeVar("T")

_NOT_ENTERED = "prefetch is a context manager: `with client.prefetch(...) as leases`"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A lease that was fetched, and how many resets this client had made by then."""

    lease: Lease
    resets: int


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing more comes: exhausted, or an error."""

    error: Exception | None


class AsyncPrefetch:
    """Made by `AsyncRolloutClient.prefetch`; `async with` it, then `async for` over it."""

    def __init__(self, client: AsyncRolloutClient, core: Core, ask: Mapping[str, Any], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is at least 1, not {depth}")
        self._client, self._core, self._ask = client, core, dict(ask)
        self._room = asyncio.Semaphore(depth)
        self._queue: asyncio.Queue[_Waiting | _End] = asyncio.Queue()
        self._asking: str | None = None
        """The request id of a call on its way."""
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()
        self._in_hand: Lease | None = None
        self._fetcher: asyncio.Task[None] | None = None
        self._max_staleness = 0

    async def __aenter__(self) -> Self:
        self._max_staleness = (await self._client.version()).max_staleness
        self._fetcher = asyncio.create_task(self._fetch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.cancel()
            await asyncio.wait([fetcher])
        try:
            if self._in_hand is not None and kind is None:
                await self._finish()
        finally:
            await self._leave_nothing_behind()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Lease:
        if (lease := await self._next()) is None:
            raise StopAsyncIteration
        return lease

    async def _next(self) -> Lease | None:
        """The next lease, None at the end."""
        if self._fetcher is None:
            raise RuntimeError(_NOT_ENTERED)
        await self._finish()
        while True:
            item = await self._queue.get()
            if isinstance(item, _End):
                self._queue.put_nowait(item)  # the end stays the end
                if item.error is not None:
                    raise item.error
                return None
            self._room.release()
            if (lease := await self._still_good(item)) is not None:
                self._in_hand = lease
                return lease

    async def _fetch(self) -> None:
        while True:
            await self._room.acquire()
            try:
                lease = await self._one_lease()
            except Exception as error:  # the consumer raises it, whatever it is
                self._queue.put_nowait(_End(error))
                return
            if lease is None:
                self._queue.put_nowait(_End(None))
                return

    async def _one_lease(self) -> Lease | None:
        """Wait for a lease with groups and queue it; None when exhausted."""
        while True:
            resets = self._core.resets
            self._asking = str(uuid.uuid4())
            try:
                lease = await self._client.lease(**self._ask, request_id=self._asking)
            except Problem:
                self._asking = None  # refused: there is no lease to look for on the way out
                raise
            self._asking = None
            if lease.status is LeaseStatus.EXHAUSTED:
                return None
            if lease.groups and lease.lease_id is not None:
                self._core.hold(lease)
                self._renewals[lease.lease_id] = asyncio.create_task(self._keep(lease.lease_id))
                self._queue.put_nowait(_Waiting(lease, resets))
                return lease

    async def _keep(self, lease_id: str) -> None:
        """Renew until cancelled or lost."""
        while True:
            await asyncio.sleep(self._ask["lease_s"] / 2)
            try:
                await self._client.renew(lease_id)
            except (Conflict, NotFound) as error:
                logger.warning("lease %s is lost: %s", lease_id, error)
                self._lost.add(lease_id)
                return
            except ClientError as error:
                logger.warning("lease %s could not be renewed yet: %s", lease_id, error)

    async def _still_good(self, waiting: _Waiting) -> Lease | None:
        """The lease without what has become stale since it was made (given back); None when nothing is left."""
        lease = waiting.lease
        lease_id = lease.lease_id or ""
        if waiting.resets != self._core.resets or lease_id in self._lost:
            # Void, as far as is known here. Given back all the same: it may have been made just after the reset.
            self._stop_keeping(lease_id)
            await self._client._run(self._core.give_back(lease_id))
            return None
        posted = self._core.posted_version
        # Somebody else posts the versions (another rank does): only the service knows the current one.
        version = posted if posted is not None else (await self._client.version()).version
        version = max(version, lease.policy_version)
        good = [group for group in lease.groups if version - group.policy_version <= self._max_staleness]
        too_old = [group.group_id for group in lease.groups if version - group.policy_version > self._max_staleness]
        if too_old:
            await self._release(lease_id, too_old)
        if not good:
            self._stop_keeping(lease_id)
            return None
        now = [msgspec.structs.replace(group, staleness=version - group.policy_version) for group in good]
        return msgspec.structs.replace(lease, policy_version=version, groups=now)

    async def _release(self, lease_id: str, group_ids: list[str]) -> None:
        try:
            await self._client.release(lease_id, group_ids)
        except (Conflict, NotFound) as error:  # the lease ran out: the service has them already
            logger.warning("stale groups of lease %s were no longer ours: %s", lease_id, error)

    async def _finish(self) -> None:
        """Ack the lease in hand."""
        lease, self._in_hand = self._in_hand, None
        if lease is not None:
            try:
                await self._client._run(self._core.finish(lease))
            finally:
                self._stop_keeping(lease.lease_id or "")

    def _stop_keeping(self, lease_id: str) -> None:
        if (task := self._renewals.pop(lease_id, None)) is not None:
            task.cancel()

    async def _leave_nothing_behind(self) -> None:
        tasks = list(self._renewals.values())
        for lease_id in list(self._renewals):
            self._stop_keeping(lease_id)
            await self._client._run(self._core.give_back(lease_id))
        if tasks:
            await asyncio.wait(tasks)
        if self._asking is not None:
            await self._client._run(self._core.recover(self._ask, self._asking))


class Prefetch:
    """Made by `RolloutClient.prefetch`; `with` it, then loop over it. One `AsyncPrefetch` in a thread of its own."""

    def __init__(self, connect: Callable[[], AsyncRolloutClient], ask: Mapping[str, Any], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is at least 1, not {depth}")
        self._connect, self._ask, self._depth = connect, dict(ask), depth
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._client: AsyncRolloutClient | None = None
        self._inner: AsyncPrefetch | None = None

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="trainer-client-prefetch", daemon=True
        )
        self._thread.start()
        started.wait()
        try:
            self._inner = self._wait(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    async def _live(self, started: threading.Event) -> None:
        self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._left.wait()
        if self._client is not None:
            await self._client.aclose()

    async def _open(self) -> AsyncPrefetch:
        self._client = self._connect()
        inner = self._client.prefetch(**self._ask, depth=self._depth)
        return await inner.__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._inner is not None:
                self._wait(self._inner.__aexit__(kind, error, traceback))
        finally:
            self._inner = None
            self._stop()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lease:
        if self._inner is None:
            raise RuntimeError(_NOT_ENTERED)
        if (lease := self._wait(self._inner._next())) is None:
            raise StopIteration
        return lease

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            raise RuntimeError(_NOT_ENTERED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt of the waiting thread ends the work too
            future.cancel()
            raise

    def _stop(self) -> None:
        if self._loop is not None and self._left is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._left.set)
            self._thread.join()
            self._loop = self._left = self._thread = self._client = None
