"""Keeps the engines of a fleet equal to what sources list: DNS names, files (see `sources`).

What always holds: a look that fails changes nothing, and is said once until it fails for another reason; one that
succeeds adds what is new and removes, with a drain, what no source lists any more. Only what was added here is removed
here: engines of the configuration and of `POST /engines` stay. An engine that an operator removed stays out until a
look has not found it listed, or where replicas share their engines as long as `kept_out` says so. One that is wrong for
the run is tried again at each look, and said once a reason. No look waits for another source, for an engine to answer,
or for one to become empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from rollout_service.engines.sources import LookFailed, Source
from rollout_service.engines.vllm import EngineSpec
from rollout_service.errors import EngineRefused, NotFound, RolloutServiceError, ShuttingDown
from rollout_service.settings.urls import same_engine

LOOK_S = 5.0
"""How long a look is waited for. It goes on, and is the next one: a resolver that hangs has one call at most."""
START_S = 10.0
"""How long a start waits for the first look and the first contacts; what comes later is used when it comes."""

Key = tuple[str, str, int, str]
"""An address in one spelling."""

log = structlog.get_logger(__name__)


class Address(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def url(self) -> str: ...


class Engine(Protocol):
    """A member of the fleet."""

    @property
    def engine(self) -> Address: ...

    @property
    def leaving(self) -> bool: ...


class Engines(Protocol):
    """The members of the fleet, those that are leaving included."""

    def __iter__(self) -> Iterator[Engine]: ...

    async def add(self, spec: EngineSpec, *, resize: bool) -> tuple[Engine, bool]:
        """The one at that address, and whether it is new. It is a member from the first step of the call on."""

    async def remove(self, id: str, *, drain_s: float) -> Engine:
        """Returns when it is gone."""


@dataclass(kw_only=True, slots=True)
class _Place:
    """A source, and what it said last."""

    source: Source
    listed: Mapping[Key, EngineSpec] = field(default_factory=dict)
    look: asyncio.Task[Sequence[EngineSpec]] | None = None
    was_read: bool = False
    """A look has succeeded."""
    failure: str | None = None


class Discovery:
    """Looks at `sources`, the first of which wins where two list one engine, and changes `engines`."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        engines: Engines,
        interval_s: float,
        drain_s: float,
        kept_out: Callable[[str], bool] | None = None,
    ) -> None:
        """`interval_s` lies between two looks; `drain_s` is what an engine that is listed no more is given; `kept_out`:
        whether the engine of a URL is to stay out, None where only this service removes engines."""
        self._places = [_Place(source=source) for source in sources]
        self._engines = engines
        self._interval_s = interval_s
        self._drain_s = drain_s
        self._others_keep_out = kept_out
        self._members: dict[Key, str] = {}
        """Of each listed engine that was a member at the last look: its id."""
        self._ours: dict[Key, Engine] = {}
        """Of those that were added here."""
        self._by_hand: set[Key] = set()
        """Members somebody asked for."""
        self._kept_out: set[Key] = set()
        """Listed, and removed by an operator."""
        self._said: dict[Key, str] = {}
        """Why one cannot be added."""
        self._changes: dict[Key, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    async def start(self) -> None:
        """Look once, and then again and again. Returns within `START_S`, whatever the sources and engines do."""
        if not self._places:
            return
        self._watch = asyncio.get_running_loop().create_task(self._watching(), name="engines-discovery")
        try:
            async with asyncio.timeout(START_S):
                await self._looked.wait()
                if self._changes:
                    await asyncio.wait(list(self._changes.values()))
        except TimeoutError:
            log.warning("engines_discovery_is_slow", detail=f"the start goes on without it after {START_S:g} s")

    async def stop(self) -> None:
        """Change nothing any more. What was begun is carried on by the fleet until that stops."""
        looks = [place.look for place in self._places if place.look is not None]
        tasks: list[asyncio.Task[Any]] = [*looks, *self._changes.values()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def look(self) -> None:
        """Look at every source, and begin what follows from it. Returns within about `LOOK_S`."""
        await asyncio.gather(*map(self._look_at, self._places))
        self._settle()

    def listed(self, key: Key) -> EngineSpec | None:
        """The engine as the first source that lists it does, by its last look that succeeded."""
        return next((place.listed[key] for place in self._places if key in place.listed), None)

    def leave_alone(self, key: Key) -> None:
        """Somebody asked for the engine, which is a member: it stays when no source lists it any more."""
        self._by_hand.add(key)

    @property
    def is_complete(self) -> bool:
        """Whether every source was read at least once."""
        return all(place.was_read for place in self._places)

    def failing(self) -> dict[str, str]:
        """Source, as configured -> why its last look failed."""
        return {place.source.name: place.failure for place in self._places if place.failure is not None}

    # -- looks

    async def _watching(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # what one round met must not end the watch
                log.exception("engines_discovery_failed")
            self._looked.set()
            await asyncio.sleep(self._interval_s)

    async def _look_at(self, place: _Place) -> None:
        if place.look is None:
            place.look = asyncio.get_running_loop().create_task(_looking(place.source), name="engines-look")
        done, _ = await asyncio.wait({place.look}, timeout=LOOK_S)
        if not done:
            self._failed(place, f"no answer within {LOOK_S:g} s")
            return
        look, place.look = place.look, None
        try:
            specs = look.result()
        except LookFailed as failed:
            self._failed(place, str(failed))
            return
        except Exception as error:  # a fault of ours; the other sources go on, and so does this one at its next look
            self._failed(place, f"{type(error).__name__}: {error}", error)
            return
        if place.failure is not None:
            log.info("engines_source_reads_again", source=place.source.name, engines=len(specs))
            place.failure = None
        place.listed, place.was_read = {same_engine(spec.url): spec for spec in specs}, True

    def _failed(self, place: _Place, why: str, fault: Exception | None = None) -> None:
        if why != place.failure:
            log.warning("engines_source_failed", source=place.source.name, error=why, exc_info=fault)
        place.failure = why

    # -- what follows

    def _settle(self) -> None:
        """Begin to add what is listed and no member, and to remove what is ours and listed no more."""
        listed: dict[Key, EngineSpec] = {}
        for place in reversed(self._places):
            listed.update(place.listed)
        there = {same_engine(member.engine.url): member for member in self._engines}
        self._kept_out &= listed.keys()
        self._by_hand &= there.keys()
        self._said = {key: why for key, why in self._said.items() if key in listed}
        for key in self._members.keys() - listed.keys() - self._changes.keys():
            self._unlisted(key, there.get(key))
        for key, spec in listed.items():
            if key not in self._changes:
                self._listed(key, spec, there.get(key))

    def _listed(self, key: Key, spec: EngineSpec, member: Engine | None) -> None:
        if member is not None and not member.leaving:
            self._members[key] = member.engine.id
        elif key in self._members:  # whatever is removed here is among the changes until it is gone
            self._forget(key)
            if self._others_keep_out is None:
                self._kept_out.add(key)
                log.info("engine_kept_out", engine=spec.url, detail="removed by an operator, and still listed")
        elif member is None and not self._keeps_out(key, spec):
            self._begin(key, self._add(key, spec))

    def _keeps_out(self, key: Key, spec: EngineSpec) -> bool:
        return key in self._kept_out if self._others_keep_out is None else self._others_keep_out(spec.url)

    def _unlisted(self, key: Key, member: Engine | None) -> None:
        ours = self._ours.get(key)
        self._forget(key)
        if member is not None and not member.leaving and member is ours and key not in self._by_hand:
            log.info("engine_listed_no_more", id=member.engine.id, engine=member.engine.url)
            self._begin(key, self._remove(member))

    def _forget(self, key: Key) -> None:
        self._members.pop(key, None)
        self._ours.pop(key, None)

    def _begin(self, key: Key, change: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(change, name="engines-discovery-change")
        self._changes[key] = task
        task.add_done_callback(lambda _: self._changes.pop(key))

    async def _add(self, key: Key, spec: EngineSpec) -> None:
        call = asyncio.ensure_future(self._engines.add(spec, resize=False))
        try:
            await asyncio.sleep(0)  # it is a member now, and an operator may remove it before its contact has ended
            joined = next((member for member in self._engines if same_engine(member.engine.url) == key), None)
            if joined is not None and not joined.leaving:
                self._members[key] = joined.engine.id
            member, new = await call
        except EngineRefused as refused:
            if joined is None or not joined.leaving:
                self._forget(key)
            self._say(key, spec, str(refused))
        except ShuttingDown:
            return  # nothing is to be added any more
        except RolloutServiceError as error:
            # Too many, or removed meanwhile: the next look tells.
            self._say(key, spec, str(error))
        except Exception:  # a fault of ours costs this engine, and is tried again
            self._forget(key)
            log.exception("engine_not_added", engine=spec.url)
        else:
            self._members[key] = member.engine.id
            if new:
                self._ours[key] = member
        finally:
            call.cancel()

    async def _remove(self, member: Engine) -> None:
        try:
            await self._engines.remove(member.engine.id, drain_s=self._drain_s)
        except (NotFound, ShuttingDown):
            return  # somebody else did, or will not
        except Exception:  # a fault of ours; nobody waits for this task, so it is said here
            log.exception("engine_not_removed", id=member.engine.id, engine=member.engine.url)

    def _say(self, key: Key, spec: EngineSpec, why: str) -> None:
        if self._said.get(key) != why:
            log.warning("engine_not_added", engine=spec.url, error=why)
        self._said[key] = why


async def _looking(source: Source) -> Sequence[EngineSpec]:
    return await source.look()
