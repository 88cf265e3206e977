"""The heartbeat that keeps this replica's claims, and what happens when it fails.

What always holds: everything in flight is aborted before the claims may be taken over; after that this replica comes
back under a new id, with nothing claimed; what it says of itself is at most a heartbeat old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rollout_service.core.shared import Replica
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.replicas.resident import Resident
from rollout_service.store.shared import SharedStore, Signal

log = structlog.get_logger(__name__)

BEATS = 5
"""Heartbeats in a lease: three in a row may be lost."""
MARGIN = 0.2
"""Of the lease, kept for aborting: engines are told at once; connections close while others may take over already."""
LEAVE_S = 2.0
"""For giving the claims back at the end; else others take them when the heartbeat's time is over."""
AGAIN_S = 0.3
"""Between two beats while the store is away, so that little of the lease is lost when it is back."""
BACK_S = 1.0
"""Between two tries to come back."""


class Heart:
    """Joins, beats, abandons, comes back."""

    def __init__(
        self,
        store: SharedStore,
        resident: Resident,
        describe: Callable[[str], Replica],
        *,
        lease_s: float,
        new_id: Callable[[], str],
    ) -> None:
        """`describe`: what this replica says of itself, under an id."""
        self._store, self._resident, self._describe = store, resident, describe
        self._lease_s, self._new_id = lease_s, new_id
        self.error: str | None = "not joined yet"
        """Why nothing is worked for; None while the claims are safe."""
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ConfigError, StoreUnavailable."""
        await self._join()
        self._tasks = [
            asyncio.create_task(self._work(), name="heart"),
            asyncio.create_task(self._watch_others(), name="expel"),
        ]

    async def stop(self) -> None:
        """No more beats; the claims are given back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._resident.replica_id:
            async with asyncio.timeout(LEAVE_S):
                await self._store.leave(self._resident.replica_id)

    def lost_store(self, why: str) -> None:
        """A commit failed for good; what it decided never happened."""
        self.error = self.error or why
        self._lost.set()

    async def beat(self, signal: Signal | None = None) -> None:
        """Raises StoreUnavailable."""
        resident, sent = self._resident, asyncio.get_running_loop().time()
        replica_id = resident.replica_id
        if await self._store.beat(self._describe(replica_id), lease_s=self._lease_s, signal=signal):
            if resident.replica_id == replica_id:
                resident.until = max(resident.until, sent + self._lease_s * (1 - MARGIN))
        elif resident.replica_id == replica_id:
            self.lost_store("the other replicas took this one for dead: its heartbeat came too late")

    async def _join(self) -> None:
        replica_id = self._new_id()
        await self._store.join(self._describe(replica_id), lease_s=self._lease_s)
        sent = asyncio.get_running_loop().time()  # joining may have waited for others who join
        if not await self._store.beat(self._describe(replica_id), lease_s=self._lease_s):
            raise StoreUnavailable("expelled while joining")
        run = (await self._store.overview()).run
        self._lost.clear()
        self.error = None
        self._resident.until = sent + self._lease_s * (1 - MARGIN)
        self._resident.begin(replica_id, run)
        log.info("joined", replica=replica_id, policy_version=run.run.policy_version)

    async def _work(self) -> None:
        while True:
            try:
                await self._live()
                await self._come_back()
            except Exception:  # a fault of ours must not leave the claims without a heartbeat unnoticed
                log.exception("heart_raised")
                self.lost_store("the heartbeat failed")
                await asyncio.sleep(BACK_S)

    async def _live(self) -> None:
        """Beat until the claims are lost."""
        said = False
        while not self._lost.is_set():
            left, pause = self._resident.until - asyncio.get_running_loop().time(), self._lease_s / BEATS
            if left <= 0:
                self.lost_store(f"the store could not be reached for {self._lease_s * (1 - MARGIN):g} s")
                return
            try:
                async with asyncio.timeout(left):
                    await self.beat()
                said = False
            except (StoreUnavailable, TimeoutError) as error:
                if not said:
                    log.warning("heartbeat_failed", error=str(error), claims_end_in_s=round(left, 1))
                said, pause = True, min(AGAIN_S, pause)
            left = self._resident.until - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(0.0, min(pause, left))):
                    await self._lost.wait()
            except TimeoutError:
                pass  # time for the next one

    async def _watch_others(self) -> None:
        """Take over from those whose time is over. Apart from the heartbeat: it waits for locks."""
        while True:
            await asyncio.sleep(self._lease_s / BEATS)
            if self._resident.until - asyncio.get_running_loop().time() < self._lease_s / 2:
                continue  # its own heartbeat first: a host that slept must not take itself for dead
            try:
                for name in await self._store.expel():
                    log.warning("replica_expelled", name=name, action="its groups are taken over")
            except StoreUnavailable as error:
                log.debug("expel_waits", error=str(error))  # the heartbeat says it aloud
            except Exception:  # a fault of ours must not keep the dead one's groups for ever
                log.exception("expel_raised")

    async def _come_back(self) -> None:
        await self._resident.abandon(self.error or "the store was lost")
        before = self._resident.replica_id
        while True:
            try:
                await self._store.leave(before)
                await self._join()
                return
            except (StoreUnavailable, ConfigError) as error:
                self.error = str(error)
            await asyncio.sleep(BACK_S)
