"""Engines that operators add and remove at any replica are added and removed at all of them.

What always holds: what a call returned from is in the store, and every replica follows it, those that start later too;
an engine that was removed stays out, wherever else it is named, until somebody adds it, or it is named nowhere and may
come back as another one. No look waits for an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import structlog

from rollout_service.core.shared import EngineWish
from rollout_service.errors import NotFound, RolloutServiceError, ShuttingDown, StoreUnavailable
from rollout_service.settings.tables import Inflight
from rollout_service.settings.urls import one_spelling
from rollout_service.store.shared import SharedStore

log = structlog.get_logger(__name__)

LOOK_S = 5.0
"""Between two looks: a net for signals that are lost, and the next try where an engine could not be added."""
START_S = 10.0
"""How long a start waits for first contacts; an engine that comes later is used when it comes."""
FORGET_S = 60.0
"""How long a removal is remembered at least: longer than any replica takes to see it."""
DRAIN_S = 30.0
"""For what runs on an engine that nobody wants any more and nobody said how it should leave."""


class Fleet(Protocol):
    """The engines of this replica."""

    def describe(self) -> list[dict[str, Any]]:
        """One dict an engine: id, url, leaving …"""

    def names(self, url: str) -> bool:
        """Whether the configuration, or a list it names, has the engine."""

    async def add_engine(self, url: str, max_inflight: Inflight | None = None) -> tuple[dict[str, Any], bool]: ...

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]: ...


class SharedEngines:
    """Keeps the engines of this replica as the run's operators want them. The calls are those of the fleet."""

    def __init__(self, store: SharedStore, fleet: Fleet) -> None:
        self._store, self._fleet = store, fleet
        self._wake = asyncio.Event()
        self._called: list[str] = []
        """Engines a call here is busy with, once for each call: it says itself what is to become of them."""
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[str, int] = {}
        """Number of the wish an engine here has."""
        self._ours: set[str] = set()
        """Engines that are here for a wish only."""
        self._said: dict[str, str] = {}
        """Why one cannot be added."""
        self._task: asyncio.Task[None] | None = None

    # life

    async def start(self) -> None:
        """Follow what was asked for before. Raises StoreUnavailable."""
        await self.look()
        if self._changes:
            await asyncio.wait(list(self._changes.values()), timeout=START_S)
        self._task = asyncio.create_task(self._work(), name="shared-engines")

    async def stop(self) -> None:
        tasks = [*self._changes.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self) -> None:
        """Somebody asked for something."""
        self._wake.set()

    # calls

    async def add_engine(self, url: str, max_inflight: Inflight | None = None) -> tuple[dict[str, Any], bool]:
        """As the fleet's; it is contacted from here first, and the other replicas follow."""
        with self._busy(_spelled(url)):
            description, new = await self._fleet.add_engine(url, max_inflight)
            where = one_spelling(description["url"])
            if new:  # where it cannot be written down, the next look finds that nobody wants it
                self._ours.add(where)
            wish = await self._store.wish(EngineWish(url=where, wanted=True, max_inflight=max_inflight))
            self._followed[where] = wish.number
        return description, new

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]:
        """As the fleet's: it is gone from here when this returns, and no replica gives it new work."""
        where = next((one_spelling(engine["url"]) for engine in self._fleet.describe() if engine["id"] == id), None)
        if where is None:
            raise NotFound(f"no engine {id[:40]!a}", engine_id=id[:40])
        with self._busy(where):
            await self._store.wish(EngineWish(url=where, wanted=False, drain_s=drain_s))
            self._forget(where)
            return await self._fleet.remove_engine(id, drain_s=drain_s)

    @contextmanager
    def _busy(self, where: str) -> Iterator[None]:
        self._called.append(where)
        try:
            yield
        finally:
            self._called.remove(where)

    # looks

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time to look
            self._wake.clear()
            try:
                await self.look()
            except StoreUnavailable as error:
                log.debug("engines_wait", error=str(error))  # the heartbeat says it aloud
            except Exception:  # what one look met must not end them
                log.exception("engines_raised")

    async def look(self) -> None:
        """Begin what follows from the wishes of now. Raises StoreUnavailable."""
        wishes = {wish.url: wish for wish in await self._store.wishes()}
        there = {one_spelling(engine["url"]): engine for engine in self._fleet.describe()}
        for where, wish in wishes.items():
            if where in self._called or where in self._changes:
                continue
            if wish.wanted:
                self._wanted(wish, there.get(where))
            else:
                await self._unwanted(wish, there.get(where))
        for where in self._ours - wishes.keys():
            if where not in self._called and where not in self._changes:
                self._forget(where)
                if (engine := there.get(where)) is not None:
                    self._begin(where, self._remove(engine, DRAIN_S))

    def _wanted(self, wish: EngineWish, here: Mapping[str, Any] | None) -> None:
        if here is None or (self._followed.get(wish.url) != wish.number and not here["leaving"]):
            self._begin(wish.url, self._add(wish))

    async def _unwanted(self, wish: EngineWish, here: Mapping[str, Any] | None) -> None:
        self._forget(wish.url)
        if here is None:
            if not self._fleet.names(wish.url):
                await self._store.fulfil(wish.number, after_s=FORGET_S)
        elif not here["leaving"]:
            log.info("engine_unwanted", id=here["id"], engine=here["url"], detail="removed at another replica")
            self._begin(wish.url, self._remove(here, wish.drain_s))

    def _forget(self, where: str) -> None:
        self._ours.discard(where)
        self._followed.pop(where, None)
        self._said.pop(where, None)

    def _begin(self, where: str, change: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(change, name="shared-engines-change")
        self._changes[where] = task
        task.add_done_callback(lambda _: self._changes.pop(where))

    async def _add(self, wish: EngineWish) -> None:
        limit: Any = wish.max_inflight
        try:
            _, new = await self._fleet.add_engine(wish.url, limit)
        except ShuttingDown:
            return  # nothing is to be added any more
        except RolloutServiceError as error:  # not allowed here, too many, wrong, leaving: the next look tries again
            if self._said.get(wish.url) != str(error):
                log.warning("engine_not_added", engine=wish.url, error=str(error))
            self._said[wish.url] = str(error)
        except Exception:  # a fault of ours; nobody waits for this task, so it is said here
            log.exception("engine_not_added", engine=wish.url)
        else:
            self._followed[wish.url] = wish.number
            self._said.pop(wish.url, None)
            if new:
                self._ours.add(wish.url)

    async def _remove(self, engine: Mapping[str, Any], drain_s: float) -> None:
        try:
            await self._fleet.remove_engine(engine["id"], drain_s=drain_s)
        except (NotFound, ShuttingDown):
            return  # somebody else did, or nothing is to be removed any more
        except Exception:  # a fault of ours; nobody waits for this task, so it is said here
            log.exception("engine_not_removed", id=engine["id"], engine=engine["url"])


def _spelled(url: str) -> str:
    try:
        return one_spelling(url)
    except ValueError:
        return url  # the fleet says what is wrong with it
