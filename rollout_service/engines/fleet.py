"""Several engines as one: routing, capacity, waiting.

What always holds: an engine is never given more requests than its limit; where work goes is for `routing` to say;
callers that must wait are served first come first served; a slot that was given is given back exactly once. With no
healthy engine callers wait `engine_wait_s` at most, counted from when the last one was lost. Engines come and go while
it works (see `members`).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any

import structlog

from rollout_service.core.model import FailureReason, WeightUpdate
from rollout_service.engines.discovery import Discovery
from rollout_service.engines.engine_load import Limit
from rollout_service.engines.faults import EngineFault, GenerationFailed
from rollout_service.engines.health import Member
from rollout_service.engines.homes import Homes
from rollout_service.engines.http import EngineClients
from rollout_service.engines.members import Members
from rollout_service.engines.requests import GenerateRequest, RequestIds
from rollout_service.engines.retry import Answer, Deadline, Gate, Generation, RetryPolicy
from rollout_service.engines.routing import capacity, choose, takers
from rollout_service.engines.settings import POLICY_VERSION, CallTracer, EngineEvents, FleetSettings, NoEvents
from rollout_service.engines.sources import source_of
from rollout_service.engines.texts import PromptTexts
from rollout_service.engines.token_texts import TokenTexts
from rollout_service.engines.updates import WeightUpdates
from rollout_service.engines.vllm import EngineSpec, VllmEngine
from rollout_service.engines.weights import FleetReports
from rollout_service.errors import ConfigError
from rollout_service.settings.registration import allowed_url
from rollout_service.settings.urls import one_spelling, same_engine

TEXT_TRIES = 3
"""Requests for the text of one prompt; rewards do without it afterwards."""
TEXT_RETRY_S = 0.2
TEXT_REST_S = 10.0
"""After a text could not be had, none is asked for this long: rollouts hold their slots while they wait for it."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What one request wants of the engine it gets."""

    need: int
    """Tokens its context has to hold; 0: not known."""
    group: str
    rollout: str
    many_turns: bool
    avoid: Member | None
    """The engine that failed it."""

    @property
    def session(self) -> str:
        """Whose history an engine may have."""
        return self.rollout if self.many_turns else ""


def id_by_address(url: str) -> str:
    """The same for all spellings of one engine's URL, in every service."""
    return f"e-{blake2s(one_spelling(url).encode(), digest_size=5).hexdigest()}"


class _Waiter:
    __slots__ = ("entered", "slot", "wish")

    def __init__(self, wish: Wish, entered: float) -> None:
        self.wish = wish
        self.entered = entered
        self.slot: asyncio.Future[Member] = asyncio.get_running_loop().create_future()


class Fleet:
    """The engines of one service. `on_change` is called when capacity changes: health, size, who is there."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        settings: FleetSettings,
        *,
        events: EngineEvents | None = None,
        on_change: Callable[[], None] = lambda: None,
        version: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        cache_salt: Callable[[], str | None] = lambda: None,
        tracer: CallTracer | None = None,
        kept_out: Callable[[str], bool] | None = None,
    ) -> None:
        """`version` gives the current policy version; `cache_salt`: see VllmEngine; `kept_out`: whether the engine of a
        URL stays out wherever it is named, None where nobody but this fleet is asked to remove engines."""
        sources = {spec: source_of(spec) for spec in specs}
        self._specs = tuple(spec for spec, source in sources.items() if source is None)
        self._settings = settings
        self._events: EngineEvents = events or NoEvents()
        self._on_change = on_change
        self._version = version
        self._reports = FleetReports()
        self._updates = WeightUpdates(lambda: list(self._members), adapters_kept=settings.adapters_kept)
        self._clock = clock
        self._cache_salt = cache_salt
        self._tracer = tracer
        self._kept_out = kept_out or (lambda _: False)
        self._policy = RetryPolicy(max_attempts=settings.max_attempts)
        self._ids = RequestIds()
        self._members = Members(
            self._member,
            changed=self._changed,
            most=settings.max_engines,
            id_of=id_by_address if settings.ids_by_address else lambda _: None,
        )
        self._discovery = Discovery(
            [source for source in sources.values() if source is not None],
            engines=self._members,
            interval_s=settings.discovery_interval_s,
            drain_s=settings.discovery_drain_s,
            kept_out=kept_out,
        )
        self._clients: EngineClients | None = None
        self._homes = Homes()
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._longest: float = math.inf
        self._dark_since: float | None = None
        self._dark_timer: asyncio.TimerHandle | None = None
        self._texts = PromptTexts(self._fetch_text)
        self._texts_from = -math.inf
        self._token_texts = TokenTexts()
        self._said: set[str] = set()

    # -- life

    async def start(self) -> None:
        """Contact every engine, then watch them. Raises ConfigError when one that answers is wrong for this run."""
        self._clients = EngineClients()
        self._dark_since = self._clock()
        try:
            await self._members.start([spec for spec in self._specs if not self._kept_out(spec.url)])
            await self._discovery.start()
        except BaseException:
            await self.stop()
            raise

    def _member(self, id: str, spec: EngineSpec) -> Member:
        assert self._clients is not None  # noqa: S101 - for mypy: nobody is a member before the start
        try:
            engine = VllmEngine(
                spec,
                id=id,
                clients=self._clients,
                events=self._events,
                clock=self._clock,
                model_name=self._model_name,
                cache_salt=self._cache_salt,
                tracer=self._tracer,
            )
        except ValueError:
            # Without the URL: what cannot be parsed cannot be freed of credentials either.
            raise ConfigError(f"the URL of engine {id} is no URL") from None
        member = Member(
            engine,
            spec,
            self._settings,
            changed=self._changed,
            version=self._version,
            reports=self._reports,
            clock=self._clock,
            alone=lambda: len(self._members) < 2,
        )
        member.current = self._updates.current
        return member

    def _model_name(self, served: str) -> str:
        if not self._settings.model_per_version:
            return served
        # Of this moment, not of the group's dispatch: a retry must not name an adapter that is gone by then.
        return self._settings.model.replace(POLICY_VERSION, str(self._version()))

    async def stop(self) -> None:
        """Abort what is out, and close every connection. Bounded in time."""
        if self._dark_timer is not None:
            self._dark_timer.cancel()
        await self._discovery.stop()
        await self._texts.close()
        await self._members.stop()
        if self._clients is not None:
            await self._clients.close()

    # -- who is there

    async def add_engine(
        self, url: str, max_inflight: Limit | None = None, *, follows: bool = False
    ) -> tuple[dict[str, Any], bool]:
        """Its description, and whether it is new; one that is there already takes `max_inflight`, where given.

        One that does not answer yet is added, unhealthy, and used as soon as it answers. One that was removed though
        the configuration or a list names it comes back as it is named there, whatever else may be added. `follows`: one
        that is named may be resized, too. Raises EngineNotAllowed, InvalidField, EngineRefused with the words for what
        is wrong with it, Conflict where there are too many.
        """
        spec = self._named(url)
        if spec is None or not (follows or self._is_out(url)):
            spec = EngineSpec(url=allowed_url(url, self._settings.addable), api_key=self._settings.added_api_key)
        if max_inflight is not None:
            spec = replace(spec, max_inflight=max_inflight)
        member, new = await self._members.add(spec, resize=max_inflight is not None)
        self._discovery.leave_alone(same_engine(spec.url))
        return member.describe(), new

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]:
        """Take an engine out, and its last description when it is gone.

        It gets no new work from now on; what runs there may finish for `drain_s`, and is then aborted and goes to
        another engine, which counts as no attempt. Raises NotFound.
        """
        return (await self._members.remove(id, drain_s=drain_s)).describe()

    @property
    def most(self) -> int:
        """Engines there may be in all."""
        return self._settings.max_engines

    def names(self, url: str) -> bool | None:
        """Whether the configuration, or a list it names, has the engine; None: a list was not read yet that may."""
        if self._named(url) is not None:
            return True
        return False if self._discovery.is_complete else None

    def _named(self, url: str) -> EngineSpec | None:
        """The engine as the configuration or a list has it."""
        try:
            where = same_engine(url)
        except ValueError:
            return None
        configured = (spec for spec in self._specs if same_engine(spec.url) == where)
        return next(configured, None) or self._discovery.listed(where)

    def _is_out(self, url: str) -> bool:
        where = same_engine(url)
        return all(member.leaving or same_engine(member.engine.url) != where for member in self._members)

    async def end_changes(self) -> None:
        """Add and remove no more, and answer those who wait for it: the service is ending."""
        await self._discovery.stop()
        await self._members.end_changes()

    # -- what others see

    def healthy_capacity(self) -> int:
        """Requests the healthy engines take at once."""
        return capacity(list(self._members))

    def unhealthy(self) -> dict[str, str]:
        """URL -> what is wrong, of every engine that is not healthy and every source of engines that cannot be read."""
        engines = {
            member.engine.url: member.error or ""
            for member in self._members
            if not member.healthy and not member.leaving
        }
        return engines | self._discovery.failing()

    def describe(self) -> list[dict[str, Any]]:
        """One dict an engine, for `GET /engines`; no URL in it shows credentials."""
        return [member.describe() for member in self._members]

    # -- weights

    async def update_weights(self, update: WeightUpdate, *, again: bool = False) -> list[str]:
        """Have every engine load `update`; the ids of engines that were out before and stay behind.

        `again`: leave out who reports its version already. Raises EnginesBehind where an engine of the fleet did not
        follow (it is out from then on), Unavailable where no engine answers.
        """
        return await self._updates.apply(update, again=again)

    # -- work

    async def generate(self, request: GenerateRequest, *, gate: Gate, deadline: Deadline) -> Answer:
        """One generation, with every attempt it takes. Raises GenerationFailed; cancelling aborts at the engine."""
        generation = Generation(
            request,
            slots=self,
            gate=gate,
            deadline=deadline,
            policy=self._policy,
            ids=self._ids,
            events=self._events,
            request_timeout_s=self._settings.request_timeout_s,
            clock=self._clock,
            random=random.random,
            sending=self._sending,
            version=self._version,
        )
        return await generation.run()

    async def abort(self, rollouts: Collection[str]) -> None:
        """Have the engines abort what runs there for `rollouts`, in one call each; their tasks are cancelled next.

        Returns when the engines have answered. Nothing is lost where it fails or is too slow: cancelling aborts too.
        """
        for waiter in [waiter for waiter in self._waiters if waiter.wish.rollout in rollouts]:
            waiter.slot.cancel()  # else they would take the slots that are freed, and send what nobody wants
        await asyncio.gather(*(member.engine.abort(rollouts) for member in self._members))

    async def prompt_text(self, ids: array[int]) -> str | None:
        """The engine's own text of a prompt given as ids; None where no engine can tell."""
        return await self._texts.get(ids)

    async def token_texts(self, ids: Collection[int]) -> Mapping[int, str]:
        """Id → text, as far as an engine can tell; for people, so nobody's work waits for it."""
        able = [member for member in self._members if member.usable and member.detokenizes]
        member = min(able, key=lambda each: each.in_flight, default=None)
        return await self._token_texts.of(ids, None if member is None else member.engine)

    # -- slots

    async def acquire(
        self, request: GenerateRequest, *, gate: Gate, deadline: Deadline, avoid: Member | None
    ) -> Member:
        """A slot of an engine, with the gate open at this moment; `release` it. Raises GenerationFailed."""
        # One more than the prompt: a prompt that fills the context leaves no room for a token.
        need = 0 if request.token_ids is None else len(request.token_ids) + 1
        wish = Wish(need=need, group=request.group, rollout=request.rollout, many_turns=request.many_turns, avoid=avoid)
        while True:
            deadline.extend(await gate.passed())
            self._check_length(need)
            if deadline.remaining() <= 0:
                raise GenerationFailed(FailureReason.DEADLINE, "the rollout ran past its deadline")
            member = None if self._waiters else self._pick(wish)
            if member is not None:
                self._take(member, wish)
                return member
            member = await self._wait(wish, deadline)
            try:
                waited = await gate.passed()
            except BaseException:
                self.release(member)
                raise
            deadline.extend(waited)
            if member.usable:
                return member
            self.release(member)

    def _take(self, member: Member, wish: Wish) -> None:
        member.load.in_flight += 1
        member.load.given += 1
        if len(self._members) > 1:
            self._homes.settle(wish.group, wish.session, member)

    def release(self, member: Member) -> None:
        member.load.in_flight -= 1
        if self._waiters:
            self._wake()

    def others(self, member: Member) -> bool:
        """Whether there is another engine than `member` to ask."""
        return any(other.usable for other in self._members if other is not member)

    def _check_length(self, need: int) -> None:
        if need > self._longest:
            raise GenerationFailed(
                FailureReason.PROMPT_TOO_LONG,
                f"the prompt has {need - 1} tokens, and the engine's max_model_len is {self._longest:g}",
            )

    def _pick(self, wish: Wish) -> Member | None:
        members = self._members
        fitting = [member for member in members if member.holds(wish.need)] if wish.need else members
        homes = self._homes
        return choose(
            fitting, session=homes.of_session(wish.session), home=homes.of_group(wish.group), avoid=wish.avoid
        )

    async def _wait(self, wish: Wish, deadline: Deadline) -> Member:
        waiter = _Waiter(wish, self._clock())
        self._waiters[waiter] = None
        self._wake()
        self._watch_the_dark()
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await waiter.slot
        except BaseException as error:
            # A slot may have been given in the same moment.
            if waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
                self.release(waiter.slot.result())
            if isinstance(error, TimeoutError):
                detail = "the rollout ran past its deadline while it waited for an engine"
                raise GenerationFailed(FailureReason.DEADLINE, detail) from None
            raise
        finally:
            self._waiters.pop(waiter, None)

    def _wake(self) -> None:
        """Give free slots to those who wait, first come first served."""
        while self._waiters and takers(list(self._members)):
            for waiter in self._waiters:
                member = self._pick(waiter.wish)
                if member is not None:
                    break
            else:
                return  # what is free is too small for everyone who waits
            del self._waiters[waiter]
            if not waiter.slot.done():
                self._take(member, waiter.wish)
                waiter.slot.set_result(member)

    # -- health

    def _changed(self) -> None:
        there = [member for member in self._members if not member.leaving]
        limits = [member.engine.info.max_model_len for member in there if member.engine.info is not None]
        self._longest = max((math.inf if limit is None else limit for limit in limits), default=math.inf)
        if any(member.healthy for member in there):
            self._dark_since = None
        elif self._dark_since is None:
            self._dark_since = self._clock()
        self._watch_the_dark()
        self._wake()
        self._on_change()

    def _watch_the_dark(self) -> None:
        """Keep a timer for the caller whose `engine_wait_s` ends first: entry order is also the order of the ends."""
        if self._dark_since is None or not self._waiters:
            if self._dark_timer is not None:
                self._dark_timer.cancel()
                self._dark_timer = None
            return
        if self._dark_timer is None:
            first = next(iter(self._waiters))
            self._dark_timer = asyncio.get_running_loop().call_later(
                max(0.0, self._wait_ends(first) - self._clock()), self._give_up
            )

    def _wait_ends(self, waiter: _Waiter) -> float:
        return max(waiter.entered, self._dark_since or 0.0) + self._settings.engine_wait_s

    def _give_up(self) -> None:
        self._dark_timer = None
        now = self._clock()
        errors = "; ".join(f"{url}: {error}" for url, error in self.unhealthy().items()) or "there is none"
        while self._dark_since is not None and self._waiters:
            waiter = next(iter(self._waiters))
            if self._wait_ends(waiter) > now:
                break
            del self._waiters[waiter]
            if not waiter.slot.done():
                detail = f"no healthy engine for {self._settings.engine_wait_s:g} s ({errors})"
                waiter.slot.set_exception(GenerationFailed(FailureReason.ENGINE_UNAVAILABLE, detail))
        self._watch_the_dark()

    # -- texts and warnings

    def _sending(self, request: GenerateRequest, member: Member) -> None:
        if request.text_wanted and request.token_ids is not None:
            self._texts.want(request.token_ids)
        info = member.engine.info
        if (
            info is not None
            and info.logprobs_mode == "raw_logprobs"
            and request.sampling.get("temperature", 1) != 1
            and not self._settings.allow_raw_logprobs
        ):
            self._say_once("raw_logprobs_at_a_temperature", engine=member.engine.url, request=request.tag)

    async def _fetch_text(self, ids: array[int]) -> str | None:
        if self._clock() < self._texts_from:
            return None
        error: EngineFault | None = None
        for attempt in range(TEXT_TRIES):
            able = [member for member in self._members if member.usable and member.detokenizes]
            if not able:
                break
            member = min(able, key=lambda each: each.in_flight)
            try:
                text = await member.engine.detokenize(ids)
            except EngineFault as fault:
                error = fault
                await asyncio.sleep(TEXT_RETRY_S * (attempt + 1))
                continue
            if text is not None:
                return text
            member.detokenizes = False
        self._texts_from = self._clock() + TEXT_REST_S
        self._say_once("no_text_of_prompt_ids", error=str(error) if error else "no engine has /detokenize")
        return None

    def _say_once(self, event: str, **facts: Any) -> None:
        if event not in self._said:
            self._said.add(event)
            log.warning(event, **facts)
