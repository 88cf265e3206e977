"""The engines of a fleet, and how they come and go while it works.

What always holds: an id is never given to two addresses, and a number never twice; an address is one member, however
many calls add it at the same time; an engine that answers and is wrong for the run is no member once its call has
ended, and one that does not answer yet is one, unhealthy, and watched; a call that was begun is carried to its end even
if its caller hangs up. A member that is leaving gets no work from the moment of the call; it is gone when nothing runs
there any more: what does is given `drain_s`, and is then aborted and goes elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence

import structlog

from rollout_service.engines.health import Member
from rollout_service.engines.vllm import EngineSpec
from rollout_service.errors import ConfigError, Conflict, EngineRefused, NotFound, ShuttingDown
from rollout_service.settings.urls import same_engine

log = structlog.get_logger(__name__)


class Members:
    """Iterates over all of them, those that are leaving included."""

    def __init__(
        self,
        make: Callable[[str, EngineSpec], Member],
        *,
        changed: Callable[[], None],
        most: int,
        id_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`make(id, spec)` raises ConfigError; `changed` is called when one is gone; `most`: how many there may be;
        `id_of`: the id of an engine by its URL, None for the next number."""
        self._make = make
        self._id_of = id_of
        self._changed = changed
        self._most = most
        self._numbers = itertools.count()
        self._listed: list[Member] = []
        self._watches: dict[Member, asyncio.Task[None]] = {}
        self._adding: dict[Member, asyncio.Task[None]] = {}
        self._removals: dict[Member, _Removal] = {}
        self._ended = False

    def __iter__(self) -> Iterator[Member]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    async def start(self, specs: Sequence[EngineSpec]) -> None:
        """Contact these, then watch them. Raises ConfigError where one that answers is wrong."""
        for spec in specs:
            self._join(spec)
        contacts = await asyncio.gather(*(member.contact() for member in self), return_exceptions=True)
        for failure in contacts:
            if isinstance(failure, BaseException):
                raise failure
        for member in self:
            self._watch(member)

    async def add(self, spec: EngineSpec, *, resize: bool) -> tuple[Member, bool]:
        """The member at `spec.url`, and whether it is new; `resize`: one that is not takes the size of `spec`.

        Raises EngineRefused where what answers is wrong for the run, Conflict where there are too many already or the
        one at that address is leaving, ShuttingDown.
        """
        self._still_open()
        where = same_engine(spec.url)
        member = next((member for member in self if same_engine(member.engine.url) == where), None)
        if member is not None:
            if member.leaving:
                raise Conflict(f"{member.engine.id} at this address is being removed; add it again when it is gone")
            if resize:
                member.resize(spec)
        elif len(self) >= self._most:
            raise Conflict(f"there are {len(self)} engines already, and registration.max_engines is {self._most}")
        new = member is None
        if member is None:
            member = self._join(spec)
            self._adding[member] = _begun(self._contacted(member), f"engine-add-{member.engine.id}")
        if (adding := self._adding.get(member)) is not None:
            try:
                await self._carried(adding, member)
            except ConfigError as wrong:
                raise EngineRefused(str(wrong)) from wrong
        return member, new

    async def remove(self, id: str, *, drain_s: float) -> Member:
        """Take it out; returns when it is gone. Callers at the same time share one removal, and the shortest drain.

        Raises NotFound, ShuttingDown.
        """
        self._still_open()
        member = next((member for member in self if member.engine.id == id), None)
        if member is None:
            raise NotFound(f"no engine {id[:40]!a}", engine_id=id[:40])
        removal = self._removals.get(member)
        if removal is None:
            log.info("engine_leaves", id=member.engine.id, engine=member.engine.url, drain_s=drain_s)
            member.leave()
            ending = _begun(self._gone(member), f"engine-remove-{member.engine.id}")
            removal = self._removals[member] = _Removal(member, ending)
        removal.within(drain_s)
        await self._carried(removal.ending, member)
        return member

    async def end_changes(self) -> None:
        """Break off what is under way, answering its callers, and begin nothing more."""
        self._ended = True
        for removal in self._removals.values():
            removal.stop()
        tasks = [*self._adding.values(), *(removal.ending for removal in self._removals.values())]
        await _cancelled(tasks)

    async def stop(self) -> None:
        """No probe, no connection is left. Bounded in time."""
        await self.end_changes()
        await _cancelled(list(self._watches.values()))
        self._watches.clear()
        await asyncio.gather(*(member.close() for member in self))

    def _still_open(self) -> None:
        if self._ended:
            raise ShuttingDown("the service is ending; its engines change no more")

    async def _carried(self, change: asyncio.Task[None], member: Member) -> None:
        """Wait for the end of `change`, which does not end with its caller."""
        try:
            await asyncio.shield(change)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not change.cancelled() or (caller is not None and caller.cancelling()):
                raise
            self._still_open()
            raise Conflict(f"{member.engine.id} was removed before its first contact ended") from None

    def _join(self, spec: EngineSpec) -> Member:
        member = self._make(self._id_of(spec.url) or f"e{next(self._numbers)}", spec)
        self._listed.append(member)
        return member

    def _watch(self, member: Member) -> None:
        name = f"engine-watch-{member.engine.id}"
        self._watches[member] = asyncio.get_running_loop().create_task(member.watch(), name=name)

    async def _contacted(self, member: Member) -> None:
        try:
            await member.contact()
        except BaseException as error:
            if member.leaving or self._ended:
                raise  # whoever has it leave, or stops all, lists and closes it
            self._listed.remove(member)
            log.info("engine_refused", id=member.engine.id, engine=member.engine.url, error=str(error))
            await member.close()
            raise
        finally:
            del self._adding[member]
        log.info("engine_added", id=member.engine.id, engine=member.engine.url, healthy=member.healthy)
        self._watch(member)

    async def _gone(self, member: Member) -> None:
        # One that is not contacted yet has no watch; its first contact is of no use to anybody now.
        if (adding := self._adding.get(member)) is not None:
            await _cancelled([adding])
        await member.emptied()
        self._removals[member].stop()
        if (watch := self._watches.get(member)) is not None:
            await _cancelled([watch])
            del self._watches[member]
        await member.close()
        self._listed.remove(member)
        del self._removals[member]
        log.info("engine_removed", id=member.engine.id, engine=member.engine.url)
        self._changed()


class _Removal:
    """One removal under way."""

    def __init__(self, member: Member, ending: asyncio.Task[None]) -> None:
        self.ending = ending
        self._member = member
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf
        """When; uvloop does not say it of a timer that is due."""

    def within(self, drain_s: float) -> None:
        """What runs there is recalled `drain_s` from now at the latest."""
        loop = asyncio.get_running_loop()
        at = loop.time() + drain_s
        if self._at <= at:
            return
        self.stop()
        self._at = at
        self._timer = loop.call_at(at, self._member.recall)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _begun(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work, name=name)
    # Its callers may all have gone by the time it fails; it has logged what went wrong.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
