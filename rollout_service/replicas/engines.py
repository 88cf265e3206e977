"""Engines that operators add and remove at any replica are added and removed at all of them.

What always holds: the last word on each engine is in the store before its call returns, and every replica follows it,
those that start later too. An engine that was removed stays out, wherever else it is named, until somebody adds it, or
for `FORGET_S` no replica has had it or found it named: what comes to that address then is another one. No look waits
for an engine, and what a look read is not followed where a call at this replica said something else meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
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
FORGET_S = 20.0
"""Some looks: each replica that finds a removed engine named says so at each of its own."""
START_S = 10.0
"""How long a start waits for first contacts; an engine that comes later is used when it comes."""
DRAIN_S = 30.0
"""For what runs on an engine that nobody wants any more and nobody said how it should leave."""

Description = dict[str, Any]


class Fleet(Protocol):
    """The engines of this replica. An engine has the same id in all of them."""

    @property
    def most(self) -> int:
        """Engines there may be in all."""

    def describe(self) -> list[Description]:
        """One dict an engine: id, url, leaving …"""

    def names(self, url: str) -> bool | None:
        """Whether the configuration, or a list it names, has the engine; None as long as that is not known."""

    async def add_engine(
        self, url: str, max_inflight: Inflight | None = None, *, follows: bool = False
    ) -> tuple[Description, bool]: ...

    async def remove_engine(self, id: str, *, drain_s: float) -> Description:
        """It is leaving from the first step of the call on; who asks again may shorten the drain."""


class SharedEngines:
    """Keeps the engines of this replica as the run's operators want them. The calls are those of the fleet.

    Engines are told apart by their URL in its one spelling.
    """

    def __init__(self, store: SharedStore, fleet: Fleet) -> None:
        self._store, self._fleet = store, fleet
        self._wake, self._looking = asyncio.Event(), asyncio.Lock()
        self._out: set[str] = set()
        """Removed, and to stay out."""
        self._ours: set[str] = set()
        """In the fleet because somebody asked for them, and not because they are named."""
        self._followed: dict[str, int] = {}
        """Number of the wish that was carried out here, or is being."""
        self._calls: Counter[str] = Counter()
        """Under way here: they say themselves what is to become of the engine."""
        self._turn = 0
        self._turns: dict[str, int] = {}
        """The last turn in which a call began or ended."""
        self._skipped: set[str] = set()
        """Passed over by a look, which is to be repeated when what was in its way is over."""
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._removing: dict[asyncio.Task[None], str] = {}
        self._said: dict[str, str] = {}
        """Why one cannot be added."""
        self._task: asyncio.Task[None] | None = None

    # life

    async def read(self) -> None:
        """Learn what `keeps_out`, before the fleet starts. Raises StoreUnavailable."""
        self._out = {wish.url for wish in await self._store.wishes() if not wish.wanted}

    def keeps_out(self, url: str) -> bool:
        """Whether the engine was removed, and is not to come back for being named."""
        return one_spelling(url) in self._out

    async def start(self) -> None:
        """Follow what was asked for until now, and from now on. Raises StoreUnavailable."""
        await self.look()
        if self._adding:
            await asyncio.wait(list(self._adding.values()), timeout=START_S)
        self._task = asyncio.create_task(self._work(), name="shared-engines")

    async def stop(self) -> None:
        """Follow nothing any more; what the fleet has begun is the fleet's to end."""
        tasks = [*self._adding.values(), *self._removing, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self) -> None:
        """Somebody asked for something."""
        self._wake.set()

    # calls

    async def add_engine(self, url: str, max_inflight: Inflight | None = None) -> tuple[Description, bool]:
        """As the fleet's; the engine is contacted from here first, and the other replicas follow. Raises Conflict, too,
        where others are asked for at the same time, and there is no room for all."""
        where = _spelled(url)
        there = any(one_spelling(engine["url"]) == where for engine in self._fleet.describe())
        with self._calling(where):
            try:
                # One that is there takes the size when that is written down.
                description, new = await self._fleet.add_engine(url, None if there else max_inflight)
            except asyncio.CancelledError:
                self._added_in_vain(where, new=not there)
                raise
            where = one_spelling(description["url"])
            self._added_in_vain(where, new=new)
            wish = EngineWish(engine_id=description["id"], url=where, wanted=True, max_inflight=max_inflight)
            named = [each["id"] for each in self._fleet.describe() if one_spelling(each["url"]) not in self._ours]
            wish = await self._store.wish(wish, beside=named, most=self._fleet.most)
            self._out.discard(where)
            if max_inflight is not None:  # what a look had begun may have come in between
                description, _ = await self._fleet.add_engine(url, max_inflight, follows=True)
            if wish.max_inflight == max_inflight:  # else there was a size before: the next look takes it
                self._followed[where] = wish.number
        return description, new

    async def remove_engine(self, id: str, *, drain_s: float) -> Description:
        """As the fleet's, of an engine any replica has: gone from here when this returns, and leaving the others."""
        urls = {engine["id"]: one_spelling(engine["url"]) for engine in self._fleet.describe()}
        if id not in urls:  # one that could not be added here, or is gone from here already
            urls |= {wish.engine_id: wish.url for wish in await self._store.wishes()}
        if (where := urls.get(id)) is None:
            raise NotFound(f"no engine {id[:40]!a}", engine_id=id[:40])
        with self._calling(where):
            wish = await self._store.wish(EngineWish(engine_id=id, url=where, wanted=False, drain_s=drain_s))
            self._out.add(where)
            self._ours.discard(where)
            self._followed[where] = wish.number
            removal = asyncio.ensure_future(self._fleet.remove_engine(id, drain_s=drain_s))
            try:
                await asyncio.sleep(0)  # its first step: the engine is leaving before a look may see it
            except asyncio.CancelledError:
                removal.cancel()
                raise
        try:
            return await removal  # not as a call: somebody may want it back, or sooner gone, before it is empty
        except NotFound:
            return {"id": id, "url": where}
        finally:
            removal.cancel()
            self._over(where)

    def _added_in_vain(self, where: str, *, new: bool) -> None:
        """Unless its wish is written down: the look after the call finds that nobody wants the engine."""
        if new:
            self._ours.add(where)
            self._skipped.add(where)

    @contextmanager
    def _calling(self, where: str) -> Iterator[None]:
        self._calls[where] += 1
        self._take_turn(where)
        try:
            yield
        finally:
            self._take_turn(where)
            self._calls[where] -= 1
            if not self._calls[where]:
                del self._calls[where]
                self._over(where)

    def _take_turn(self, where: str) -> None:
        self._turn += 1
        self._turns[where] = self._turn

    def _over(self, where: str) -> None:
        if where in self._skipped:
            self._skipped.discard(where)
            self._wake.set()

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
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        begun = self._turn
        wishes = {wish.url: wish for wish in await self._store.wishes()}
        there = {one_spelling(engine["url"]): engine for engine in self._fleet.describe()}
        spoken = {where for where, turn in self._turns.items() if turn > begun} | self._calls.keys()
        self._turns = {where: self._turns[where] for where in spoken}
        if spoken - self._calls.keys():
            self._wake.set()  # what was read may be older than the call
        self._skipped |= spoken & self._calls.keys()
        self._out = {where for where, wish in wishes.items() if not wish.wanted and where not in spoken} | (
            self._out & spoken
        )
        for where, wish in wishes.items():
            if where not in spoken:
                (self._want if wish.wanted else self._refuse)(wish, there.get(where))
        for where in self._ours - wishes.keys() - spoken:
            if self._fleet.names(where) is not True:
                self._ours.discard(where)
                if where in there:
                    self._remove(there[where], DRAIN_S)
        known = wishes.keys() | spoken
        self._followed = {where: number for where, number in self._followed.items() if where in known}
        self._said = {where: why for where, why in self._said.items() if where in known}
        await self._keep_removals([wish for where, wish in wishes.items() if where in self._out - spoken])

    def _want(self, wish: EngineWish, here: Mapping[str, Any] | None) -> None:
        where = wish.url
        if where in self._adding or (here is not None and here["leaving"]):
            self._skipped.add(where)
        elif here is None or self._followed.get(where) != wish.number:
            task = self._adding[where] = asyncio.create_task(self._add(wish), name="shared-engines-add")
            task.add_done_callback(lambda _: self._added(where))

    def _refuse(self, wish: EngineWish, here: Mapping[str, Any] | None) -> None:
        self._ours.discard(wish.url)
        if here is not None and (not here["leaving"] or self._followed.get(wish.url) != wish.number):
            self._remove(here, wish.drain_s)
        self._followed[wish.url] = wish.number

    async def _keep_removals(self, wishes: list[EngineWish]) -> None:
        """Of engines that are leaving, named, or may be named, for all that is known: the others may be forgotten."""
        there = {one_spelling(engine["url"]) for engine in self._fleet.describe()}
        for wish in wishes:
            if wish.url in there or self._fleet.names(wish.url) is not False:
                await self._store.remember_removal(wish.number)
            else:
                await self._store.forget_removal(wish.number, after_s=FORGET_S)

    def _added(self, where: str) -> None:
        del self._adding[where]
        self._over(where)

    async def _add(self, wish: EngineWish) -> None:
        limit: Any = wish.max_inflight
        try:
            _, new = await self._fleet.add_engine(wish.url, limit, follows=True)
        except ShuttingDown:
            return  # nothing is to be added any more
        except RolloutServiceError as error:  # not allowed here, too many, wrong, removed: the next look tries again
            if wish.url not in self._out and self._said.get(wish.url) != str(error):
                log.warning("engine_not_added", engine=wish.url, error=str(error))
            self._said[wish.url] = str(error)
        except Exception:  # a fault of ours; nobody waits for this task, so it is said here
            log.exception("engine_not_added", engine=wish.url)
        else:
            self._followed[wish.url] = wish.number
            self._said.pop(wish.url, None)
            if new:
                self._ours.add(wish.url)

    def _remove(self, engine: Mapping[str, Any], drain_s: float) -> None:
        log.info("engine_unwanted", id=engine["id"], engine=engine["url"], drain_s=drain_s)
        task = asyncio.create_task(self._drain(engine, drain_s), name="shared-engines-remove")
        self._removing[task] = one_spelling(engine["url"])
        task.add_done_callback(self._removed)

    def _removed(self, task: asyncio.Task[None]) -> None:
        self._over(self._removing.pop(task))

    async def _drain(self, engine: Mapping[str, Any], drain_s: float) -> None:
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
