"""Several engines as one: routing, capacity, waiting.

What always holds: an engine never has more than `max_inflight` requests; work goes to the least loaded healthy engine;
callers that must wait are served first come first served; a slot that was given is given back exactly once. With no
healthy engine callers wait `engine_wait_s` at most, counted from when the last one was lost.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from rollout_service.core.model import FailureReason, WeightUpdate
from rollout_service.engines.faults import EngineFault, GenerationFailed
from rollout_service.engines.health import Member
from rollout_service.engines.requests import GenerateRequest, RequestIds
from rollout_service.engines.retry import Answer, Deadline, Gate, Generation, RetryPolicy
from rollout_service.engines.settings import POLICY_VERSION, EngineEvents, FleetSettings, NoEvents
from rollout_service.engines.texts import PromptTexts
from rollout_service.engines.updates import WeightUpdates
from rollout_service.engines.vllm import EngineClients, EngineSpec, VllmEngine
from rollout_service.engines.weights import FleetReports
from rollout_service.errors import ConfigError

TEXT_TRIES = 3
"""Requests for the text of one prompt; rewards do without it afterwards."""
TEXT_RETRY_S = 0.2
TEXT_REST_S = 10.0
"""After a text could not be had, none is asked for this long: rollouts hold their slots while they wait for it."""

log = structlog.get_logger(__name__)


class _Waiter:
    __slots__ = ("avoid", "entered", "need", "slot")

    def __init__(self, need: int, avoid: Member | None, entered: float) -> None:
        self.need = need
        self.avoid = avoid
        self.entered = entered
        self.slot: asyncio.Future[Member] = asyncio.get_running_loop().create_future()


class Fleet:
    """The engines of one service. `on_change` is called when health, and with it capacity, changes."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        settings: FleetSettings,
        *,
        events: EngineEvents | None = None,
        on_change: Callable[[], None] = lambda: None,
        version: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version` gives the current policy version."""
        self._specs = tuple(specs)
        self._settings = settings
        self._events: EngineEvents = events or NoEvents()
        self._on_change = on_change
        self._version = version
        self._reports = FleetReports()
        self._updates = WeightUpdates(lambda: self._members, adapters_kept=settings.adapters_kept)
        self._clock = clock
        self._policy = RetryPolicy(max_attempts=settings.max_attempts)
        self._ids = RequestIds()
        self._members: list[Member] = []
        self._clients: EngineClients | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._longest: float = math.inf
        self._dark_since: float | None = None
        self._dark_timer: asyncio.TimerHandle | None = None
        self._texts = PromptTexts(self._fetch_text)
        self._texts_from = -math.inf
        self._said: set[str] = set()

    # -- life

    async def start(self) -> None:
        """Contact every engine, then watch them. Raises ConfigError when one that answers is wrong for this run."""
        clients = self._clients = EngineClients()
        self._dark_since = self._clock()
        try:
            self._members = [self._member(number, spec, clients) for number, spec in enumerate(self._specs)]
        except ConfigError:
            await self.stop()
            raise
        contacts = await asyncio.gather(*(member.contact() for member in self._members), return_exceptions=True)
        for failure in contacts:
            if isinstance(failure, BaseException):
                await self.stop()
                raise failure
        loop = asyncio.get_running_loop()
        self._watches = [loop.create_task(member.watch(), name="engine-watch") for member in self._members]

    def _member(self, number: int, spec: EngineSpec, clients: EngineClients) -> Member:
        try:
            engine = VllmEngine(
                spec,
                id=f"e{number}",
                clients=clients,
                events=self._events,
                clock=self._clock,
                model_name=self._model_name,
            )
        except ValueError:
            # Without the URL: what cannot be parsed cannot be freed of credentials either.
            raise ConfigError(f"engines[{number}].url is no URL") from None
        return Member(engine, spec, self._settings, changed=self._changed, version=self._version, reports=self._reports)

    def _model_name(self, served: str) -> str:
        if not self._settings.model_per_version:
            return served
        # Of this moment, not of the group's dispatch: a retry must not name an adapter that is gone by then.
        return self._settings.model.replace(POLICY_VERSION, str(self._version()))

    async def stop(self) -> None:
        """Abort what is out, and close every connection. Bounded in time."""
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)
            self._watches = []
        if self._dark_timer is not None:
            self._dark_timer.cancel()
        await self._texts.close()
        await asyncio.gather(*(member.close() for member in self._members))
        if self._clients is not None:
            await self._clients.close()

    # -- what others see

    def healthy_capacity(self) -> int:
        """Requests the healthy engines take at once."""
        return sum(member.max_inflight for member in self._members if member.healthy)

    def unhealthy(self) -> dict[str, str]:
        """URL -> what is wrong, of every engine that is not healthy."""
        return {member.engine.url: member.error or "" for member in self._members if not member.healthy}

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

    async def prompt_text(self, ids: array[int]) -> str | None:
        """The engine's own text of a prompt given as ids; None where no engine can tell."""
        return await self._texts.get(ids)

    # -- slots

    async def acquire(
        self, request: GenerateRequest, *, gate: Gate, deadline: Deadline, avoid: Member | None
    ) -> Member:
        """A slot of an engine, with the gate open at this moment; `release` it. Raises GenerationFailed."""
        # One more than the prompt: a prompt that fills the context leaves no room for a token.
        need = 0 if request.token_ids is None else len(request.token_ids) + 1
        while True:
            deadline.extend(await gate.passed())
            self._check_length(need)
            if deadline.remaining() <= 0:
                raise GenerationFailed(FailureReason.DEADLINE, "the rollout ran past its deadline")
            member = None if self._waiters else self._pick(need, avoid)
            if member is not None:
                member.in_flight += 1
                return member
            member = await self._wait(need, avoid, deadline)
            try:
                waited = await gate.passed()
            except BaseException:
                self.release(member)
                raise
            deadline.extend(waited)
            if member.healthy:
                return member
            self.release(member)

    def release(self, member: Member) -> None:
        member.in_flight -= 1
        if self._waiters:
            self._wake()

    def others(self, member: Member) -> bool:
        """Whether another engine than `member` is healthy."""
        return any(other.healthy for other in self._members if other is not member)

    def _check_length(self, need: int) -> None:
        if need > self._longest:
            raise GenerationFailed(
                FailureReason.PROMPT_TOO_LONG,
                f"the prompt has {need - 1} tokens, and the engine's max_model_len is {self._longest:g}",
            )

    def _pick(self, need: int, avoid: Member | None) -> Member | None:
        """The least loaded healthy engine with a free slot; the one to avoid, and doubtful ones, last."""
        best: Member | None = None
        best_key: tuple[bool, bool, int] | None = None
        for member in self._members:
            if member.free and (not need or member.holds(need)):
                key = (member is avoid, member.suspect and member.in_flight > 0, member.in_flight)
                if best_key is None or key < best_key:
                    best, best_key = member, key
        return best

    async def _wait(self, need: int, avoid: Member | None, deadline: Deadline) -> Member:
        waiter = _Waiter(need, avoid, self._clock())
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
        while self._waiters and any(member.free for member in self._members):
            for waiter in self._waiters:
                member = self._pick(waiter.need, waiter.avoid)
                if member is not None:
                    break
            else:
                return  # what is free is too small for everyone who waits
            del self._waiters[waiter]
            if not waiter.slot.done():
                member.in_flight += 1
                waiter.slot.set_result(member)

    # -- health

    def _changed(self) -> None:
        limits = [m.engine.info.max_model_len for m in self._members if m.engine.info is not None]
        self._longest = max((math.inf if limit is None else limit for limit in limits), default=math.inf)
        if any(member.healthy for member in self._members):
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
        errors = "; ".join(f"{member.engine.url}: {member.error}" for member in self._members)
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
            able = [member for member in self._members if member.healthy and member.detokenizes]
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
