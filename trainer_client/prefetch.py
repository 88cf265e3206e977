"""Leases asked for while the trainer computes.

What always holds:

- Every lease taken is acked, given back, or known to be lost; leaving the block leaves none behind.
- A lease that waits or is being trained is renewed at half of its time.
- No group is handed over that the newest version known here makes stale, or that a reset made void.
- The lease in hand is acked before the next one is waited for: the service may be waiting for that ack to know that
  nothing more will come.
- Errors reach the consumer after the leases that were taken before them, and only while it waits: a halt that was
  cleared and a service that came back while the trainer computed cost it nothing.
- A lease is in hand from the moment the consumer has it: one that an interrupt kept from it is not acked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from trainer_client import loops
from trainer_client.errors import ClientError, Conflict, Halted, NotFound, ServiceUnreachable, Unavailable
from trainer_client.types import Group, Lease, LeaseStatus

if TYPE_CHECKING:
    from trainer_client.client import AsyncRolloutClient
    from trainer_client.core import Core
    from trainer_client.progress import Progress

logger = logging.getLogger("trainer_client")

T = TypeVar("T")

AGAIN_S = 2.0
"""Pause after a call that failed although it was tried again for `retry_for_s`, which may be nothing."""
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

    def __init__(
        self, client: AsyncRolloutClient, core: Core, ask: Mapping[str, Any], depth: int, bar: Progress
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is at least 1, not {depth}")
        self._client, self._core, self._ask, self._bar = client, core, dict(ask), bar
        self._room = asyncio.Semaphore(depth)
        self._queue: asyncio.Queue[_Waiting | _End] = asyncio.Queue()
        self._wanted = asyncio.Event()
        """Set while the consumer waits for a lease and there is none."""
        self._turn = asyncio.Lock()
        """Held by the one call of `_next` that runs, until it has come to its end."""
        self._asking: str | None = None
        """The request id under which there may be a lease that is not known here."""
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()
        self._in_hand: Lease | None = None
        self._fetcher: asyncio.Task[None] | None = None
        self._max_staleness = 0

    async def __aenter__(self) -> Self:
        self._max_staleness = (await self._client.version()).max_staleness
        self._bar.__enter__()
        self._fetcher = asyncio.create_task(self._fetch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.cancel()
            await asyncio.wait([fetcher])
        self._queue.put_nowait(_End(None))  # for a call of `_next` that still waits
        async with self._turn:  # one that was interrupted is still acking what it had begun to ack
            try:
                if self._in_hand is not None and kind is None:
                    await self._finish()
            finally:
                try:
                    await self._leave_nothing_behind()
                finally:
                    self._bar.__exit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Lease:
        if (lease := await self._next()) is None:
            raise StopAsyncIteration
        self._hand_over(lease)
        return lease

    def _hand_over(self, lease: Lease) -> None:
        self._in_hand = lease
        self._bar.handed(lease)

    async def _next(self) -> Lease | None:
        """The next lease, None at the end. It is in hand once `_hand_over` was called with it."""
        if self._fetcher is None:
            raise RuntimeError(_NOT_ENTERED)
        async with self._turn:
            self._bar.asked()
            await self._finish()
            while True:
                item = await self._item()
                if isinstance(item, _End):
                    self._queue.put_nowait(item)  # the end stays the end
                    if item.error is not None:
                        raise item.error
                    self._bar.exhausted()
                    return None
                self._room.release()
                if (lease := await self._still_good(item)) is not None:
                    return lease

    async def _item(self) -> _Waiting | _End:
        if self._queue.empty():
            self._wanted.set()
        try:
            return await self._queue.get()
        finally:
            self._wanted.clear()

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
        told = False
        while True:
            waited_for, resets = self._wanted.is_set(), self._core.resets
            try:
                lease = await self._asked()
            except (ServiceUnreachable, Unavailable) as error:
                # A waiting trainer has the whole of `retry_for_s`; that a service has halted is certain at once.
                if waited_for or (isinstance(error, Halted) and self._wanted.is_set()):
                    raise
                if not told:
                    logger.warning("no lease to be had while the trainer computes, asking on: %s", error)
                told = True
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), AGAIN_S)
                continue
            if lease is None:
                continue
            if lease.status is LeaseStatus.EXHAUSTED:
                return None
            if lease.groups and lease.lease_id is not None:
                self._take(lease, lease.lease_id, resets)
                return lease

    async def _asked(self) -> Lease | None:
        """One call for a lease; None: ask again. Its request id is kept while there may be a lease under it."""
        before = self._asking is not None
        request_id = self._asking = self._asking or str(uuid.uuid4())
        try:
            lease = await self._client._run(loops.next_lease(self._core, self._ask, request_id, before))
        except ClientError as error:
            if not loops.maybe_made(error, before):
                self._asking = None
            raise
        self._asking = None
        return lease

    def _take(self, lease: Lease, lease_id: str, resets: int) -> None:
        """Queue a lease, and have it renewed from now on."""
        groups = {group.group_id for group in lease.groups}
        # No two live leases have a group in common: one from before that has, has run out.
        known = list(self._core.held.items())  # other threads add and remove
        self._lost.update(other for other, held in known if other != lease_id and held & groups)
        self._core.hold(lease)
        self._renewals[lease_id] = asyncio.create_task(self._keep(lease_id))
        self._queue.put_nowait(_Waiting(lease, resets))

    async def _keep(self, lease_id: str) -> None:
        """Renew until cancelled or lost."""
        half = pause = self._ask["lease_s"] / 2
        while True:
            await asyncio.sleep(pause)
            try:
                await self._client.renew(lease_id)
                pause = half
            except (Conflict, NotFound) as error:
                logger.warning("lease %s is lost: %s", lease_id, error)
                self._lost.add(lease_id)
                return
            except ClientError as error:
                logger.warning("lease %s could not be renewed yet: %s", lease_id, error)
                pause = min(half, AGAIN_S)  # of its time less than half is left

    async def _still_good(self, waiting: _Waiting) -> Lease | None:
        """The lease without what has become stale since it was made (given back); None when nothing is left."""
        lease = waiting.lease
        lease_id = lease.lease_id or ""
        version: int | None = None
        if waiting.resets == self._core.resets and lease_id not in self._lost:
            version = await self._current_version(lease)
        if version is None:
            # Void, as far as is known here. Given back all the same: it may have been made just after the reset.
            self._stop_keeping(lease_id)
            await self._client._run(self._core.give_back(lease_id))
            return None
        too_old = [group.group_id for group in lease.groups if self._too_old(group, version)]
        good = [group for group in lease.groups if not self._too_old(group, version)]
        if too_old:
            await self._release(lease_id, too_old)
        if not good:
            self._stop_keeping(lease_id)
            return None
        now = [msgspec.structs.replace(group, staleness=version - group.policy_version) for group in good]
        return msgspec.structs.replace(lease, policy_version=version, groups=now)

    async def _current_version(self, lease: Lease) -> int | None:
        """The policy version this lease is judged by; None: somebody went back since it was made, and it is void."""
        posted = self._core.posted_version
        if posted is not None:
            version = max(posted, lease.policy_version)
            if not any(self._too_old(group, version) for group in lease.groups):
                return version
        # Only the service knows what others have posted, and that one of them went back below what was posted here.
        version = (await self._client.version()).version
        return version if version >= lease.policy_version else None

    def _too_old(self, group: Group, version: int) -> bool:
        return version - group.policy_version > self._max_staleness

    async def _release(self, lease_id: str, group_ids: list[str]) -> None:
        try:
            await self._client.release(lease_id, group_ids)
        except (Conflict, NotFound) as error:  # the lease ran out: the service has them already
            logger.warning("stale groups of lease %s were no longer ours: %s", lease_id, error)

    async def _finish(self) -> None:
        """Ack the lease in hand."""
        lease, self._in_hand = self._in_hand, None
        if lease is None:
            return
        try:
            await self._client._run(self._core.finish(lease))
        except BaseException:
            await self._client._run(loops.finish_late(self._core, lease))
            raise
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

    def __init__(
        self, connect: Callable[[], AsyncRolloutClient], core: Core, ask: Mapping[str, Any], depth: int, bar: Progress
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is at least 1, not {depth}")
        self._connect, self._core, self._ask, self._depth, self._bar = connect, core, dict(ask), depth, bar
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
        try:
            self._thread.start()
            started.wait()
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
        return await AsyncPrefetch(self._client, self._core, self._ask, self._depth, self._bar).__aenter__()

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
        self._inner._hand_over(lease)
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
