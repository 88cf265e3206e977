"""What this replica knows of the whole run, and how it learns that something changed.

What always holds: a change of the run is taken into account within a poll, however many signals are lost; its
consequences for the groups here are committed and carried out before this replica says so to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rollout_service.core.model import GroupState
from rollout_service.core.shared import Overview, SharedRun
from rollout_service.errors import StoreUnavailable
from rollout_service.replicas.heart import Heart
from rollout_service.replicas.resident import Resident
from rollout_service.store.shared import SharedStore, Signal

log = structlog.get_logger(__name__)

POLL_S = 1.0
"""Where signals arrive by themselves: a net for those that are lost."""
POLL_ALONE_S = 0.1
"""Where they do not: a version must reach every replica within 250 ms."""


class Watch:
    """Reads the run when it is told to, or it is time."""

    def __init__(
        self,
        store: SharedStore,
        resident: Resident,
        heart: Heart,
        *,
        on_pending: Callable[[], None],
        on_ready: Callable[[], None],
        on_engines: Callable[[], None],
    ) -> None:
        """`on_pending`, `on_ready`: there may be groups to claim, to lease; `on_engines`: engines to add or remove."""
        self._store, self._resident, self._heart = store, resident, heart
        self._on_pending, self._on_ready, self._on_engines = on_pending, on_ready, on_engines
        self._wake, self._others_did = asyncio.Event(), asyncio.Event()
        self.enforced = 0
        """Revision whose consequences are out."""
        self._overview: Overview | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def overview(self) -> Overview:
        """The last look."""
        if self._overview is None:
            raise StoreUnavailable("the store was not read yet")
        return self._overview

    @property
    def outstanding(self) -> int:
        """Groups that have not ended, at the last look."""
        return sum(count for state, count in self.overview.whole.counts.items() if not state.terminal)

    async def start(self) -> None:
        self._store.watch(self._heard)
        await self.look()
        self._task = asyncio.create_task(self._work(), name="watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> Overview:
        """Raises StoreUnavailable."""
        found = await self._store.overview()
        if self._overview is None or found.now >= self._overview.now:  # answers may overtake each other
            self._overview = found
        return found

    async def enforce(self, run: SharedRun) -> None:
        """Take `run` into account, and say so when its consequences are out. Raises StoreUnavailable."""
        resident = self._resident
        await resident.follow(run)
        if resident.away or self.enforced >= resident.known.revision:
            return
        revision = resident.known.revision
        await resident.settled()
        if self.enforced < revision:
            self.enforced = revision
            await self._heart.beat(Signal.ENFORCED)

    async def others(self, revision: int, within_s: float) -> Overview:
        """Wait until every living replica has carried out `revision`, `within_s` at most. Raises StoreUnavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            self._others_did.clear()
            overview = await self.look()
            behind = [
                seen
                for seen in overview.replicas
                if seen.replica.enforced < revision and seen.expires_at > overview.now
            ]
            left = deadline - loop.time()
            if not behind or left <= 0:
                return overview
            try:
                async with asyncio.timeout(min(left, POLL_ALONE_S)):
                    await self._others_did.wait()
            except TimeoutError:
                pass  # ask again

    def _heard(self, signal: Signal) -> None:
        match signal:
            case Signal.RUN:
                self._wake.set()
            case Signal.PENDING:
                self._on_pending()
            case Signal.READY:
                self._on_ready()
            case Signal.ENFORCED:
                self._others_did.set()
            case Signal.ENGINES:
                self._on_engines()

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(POLL_S if self._store.pushes else POLL_ALONE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time to look
            self._wake.clear()
            try:
                overview = await self.look()
                if overview.run.revision > self._resident.known.revision or self.enforced < overview.run.revision:
                    await self.enforce(overview.run)
                    self._on_ready()  # a halt or a resume is news for those who wait
                    self._on_pending()
                if overview.whole.counts[GroupState.PENDING]:
                    self._on_pending()
                if overview.whole.counts[GroupState.READY]:
                    self._on_ready()
            except StoreUnavailable as error:
                log.debug("watch_waits", error=str(error))  # the heartbeat says it aloud
                await asyncio.sleep(POLL_S)
            except Exception as error:  # a fault of ours must not make this replica deaf: it begins again
                log.exception("watch_raised")
                self._heart.lost_store(f"a change of the run could not be followed: {error!r}")
                await asyncio.sleep(POLL_S)
