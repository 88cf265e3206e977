"""The one retry policy (design 3.2.4), and the loop that follows it.

What always holds: an engine request is sent only after the gate was passed, under an id never used before, and at most
`max_attempts` counted requests are sent for one generation. Not counted are only a stale keep-alive connection (once an
attempt), a transport error to an engine that a probe then finds down (at most `MAX_UNCOUNTED` times), and what passes
at an engine that is being removed (once an engine: it gets nothing new).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout_service.core.model import FailureReason, Turn
from rollout_service.engines.faults import (
    EngineFault,
    GenerationFailed,
    RequestTimeout,
    StaleConnection,
    StatusFault,
    TransportFault,
)
from rollout_service.engines.health import Member
from rollout_service.engines.requests import GenerateRequest, RequestIds
from rollout_service.engines.settings import EngineEvents

BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 5.0
RETRY_AFTER_CAP_S = 30.0
"""An engine may ask for this much; more would outlast most rollouts."""
TIMER_SLACK_S = 0.05
"""Event loops count whole milliseconds: a request cut by the deadline of its rollout may end a little before that."""
MAX_UNCOUNTED = 16
"""A prompt that kills every engine it meets must not go round for ever."""


class Gate(Protocol):
    """Closed while the service is paused or halted."""

    async def passed(self) -> float:
        """Wait until it is open; the seconds waited."""
        ...


class Deadline:
    """A moment on a clock that moves on while the gate is closed."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._at = clock() + seconds

    def remaining(self) -> float:
        """Seconds left; negative when it has passed."""
        return self._at - self._clock()

    def extend(self, seconds: float) -> None:
        self._at += seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A generation that succeeded."""

    turn: Turn
    engine: str
    """URL of the engine, without credentials."""
    attempts: int
    """Counted attempts, this one included."""
    wasted_tokens: int
    """Tokens of the attempts before, as far as known."""
    logprobs_mode: str | None
    policy_version: int
    """Current when the request that succeeded was sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When to send a failed request again, and how long to wait before."""

    max_attempts: int

    def gives_up(self, attempts: int, fault: EngineFault) -> bool:
        """Whether `fault`, which ended the counted attempt number `attempts` (from 1), is the end."""
        return not fault.transient or attempts >= self.max_attempts

    def pause_s(self, attempts: int, *, jitter: float, retry_after_s: float | None) -> float:
        """Seconds before the next attempt after `attempts` failed ones. `jitter` in [0, 1) takes off up to a half."""
        backoff = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempts - 1, 16)) * (1 - jitter / 2)
        return max(backoff, min(RETRY_AFTER_CAP_S, retry_after_s or 0.0))


class Slots(Protocol):
    """Who gives engines out."""

    async def acquire(
        self, request: GenerateRequest, *, gate: Gate, deadline: Deadline, avoid: Member | None
    ) -> Member: ...

    def release(self, member: Member) -> None: ...

    def others(self, member: Member) -> bool:
        """Whether another engine than `member` is healthy."""
        ...


class Generation:
    """One generation through all its attempts. Used once."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        slots: Slots,
        gate: Gate,
        deadline: Deadline,
        policy: RetryPolicy,
        ids: RequestIds,
        events: EngineEvents,
        request_timeout_s: float,
        clock: Callable[[], float],
        random: Callable[[], float],
        sending: Callable[[GenerateRequest, Member], None],
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._request = request
        self._slots = slots
        self._gate = gate
        self._deadline = deadline
        self._policy = policy
        self._ids = ids
        self._events = events
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._random = random
        self._sending = sending
        self._version = version
        self._sent_at_version = 0
        self._attempts = 0
        self._uncounted = 0
        self._wasted = 0
        self._last: EngineFault | None = None

    async def run(self) -> Answer:
        """Raises GenerationFailed. Cancelling aborts at the engine."""
        avoid: Member | None = None
        while True:
            member = await self._acquire(avoid)
            try:
                turn = await self._ask(member)
            except EngineFault as error:
                fault = error
            else:
                return self._answer(turn, member)
            finally:
                self._slots.release(member)
            avoid = member
            await asyncio.sleep(await self._judge(fault, member))

    async def _acquire(self, avoid: Member | None) -> Member:
        try:
            return await self._slots.acquire(self._request, gate=self._gate, deadline=self._deadline, avoid=avoid)
        except GenerationFailed as failed:
            if avoid is None:
                raise
            # What the engine did before says more than that none is there now.
            raise self._failed(failed.reason, f"{failed}; before that: {self._last}", avoid) from None

    async def _ask(self, member: Member) -> Turn:
        self._sending(self._request, member)
        try:
            return await self._once(member, fresh=False)
        except StaleConnection:
            self._deadline.extend(await self._gate.passed())
            return await self._once(member, fresh=True)

    async def _once(self, member: Member, *, fresh: bool) -> Turn:
        timeout_s = min(self._request_timeout_s, max(0.001, self._deadline.remaining()))
        request_id = self._ids.next(self._request.tag)
        sent_at = self._clock()
        self._sent_at_version = self._version()
        turn = await member.generate(self._request, request_id, timeout_s=timeout_s, fresh=fresh)
        self._events.request_done(self._clock() - sent_at)
        return turn

    def _answer(self, turn: Turn, member: Member) -> Answer:
        member.succeeded()
        info = member.engine.info
        return Answer(
            turn=turn,
            engine=member.engine.url,
            attempts=self._attempts + 1,
            wasted_tokens=self._wasted,
            logprobs_mode=info.logprobs_mode if info else None,
            policy_version=self._sent_at_version,
        )

    async def _judge(self, fault: EngineFault, member: Member) -> float:
        """Seconds to wait before the next attempt; raises GenerationFailed when there is none."""
        self._wasted += fault.tokens
        self._last = fault
        if member.leaving and fault.transient:
            self._events.retried(fault.failure_reason)
            return 0.0
        if not self._of_the_rollout(fault):
            member.failed(fault)
        down = isinstance(fault, TransportFault) and not await member.verify()
        if down and self._uncounted < MAX_UNCOUNTED:
            self._uncounted += 1
            self._events.retried(fault.failure_reason)
            return 0.0
        self._attempts += 1
        if isinstance(fault, TransportFault) or (isinstance(fault, StatusFault) and fault.status >= 500):
            member.struck(str(fault))
        if self._deadline.remaining() <= (TIMER_SLACK_S if isinstance(fault, RequestTimeout) else 0):
            raise self._failed(FailureReason.DEADLINE, f"the rollout ran past its deadline; last: {fault}", member)
        if self._policy.gives_up(self._attempts, fault):
            raise self._failed(fault.failure_reason, str(fault), member)
        retry_after_s = None if self._slots.others(member) else fault.retry_after_s
        pause_s = self._policy.pause_s(self._attempts, jitter=self._random(), retry_after_s=retry_after_s)
        if pause_s >= self._deadline.remaining():
            raise self._failed(FailureReason.DEADLINE, f"no time for another attempt; last: {fault}", member)
        self._events.retried(fault.failure_reason)
        return pause_s

    def _of_the_rollout(self, fault: EngineFault) -> bool:
        """Whether it says nothing of the engine: the prompt or its sampling is wrong, or the rollout's time was up."""
        if isinstance(fault, StatusFault):
            return fault.status in (400, 422)
        return isinstance(fault, RequestTimeout) and self._deadline.remaining() <= TIMER_SLACK_S

    def _failed(self, reason: FailureReason, detail: str, member: Member) -> GenerationFailed:
        return GenerationFailed(
            reason, detail, engine=member.engine.url, attempts=self._attempts, wasted_tokens=self._wasted
        )
