"""Lease calls that wait at this replica meet what is ready in the store.

What always holds: a lease is made in one transaction that holds its groups and the policy version; callers here are
served in order of arrival, and nobody is told `empty` before a look for them that began while they waited, unless the
service ends; a `request_id` makes one lease over all replicas.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

import structlog

from rollout_service.core.group import Lease, LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from rollout_service.errors import Conflict, Halted, RolloutServiceError, StoreUnavailable
from rollout_service.orchestrator.lease_calls import check_same_request
from rollout_service.orchestrator.parts import Observer
from rollout_service.orchestrator.serving import end_of_wait
from rollout_service.orchestrator.views import LeaseRequest, LeaseStatus
from rollout_service.orchestrator.waiters import Line, Waiter
from rollout_service.replicas import parts
from rollout_service.replicas.parts import Happened
from rollout_service.store.shared import SharedStore, Signal, Transaction

log = structlog.get_logger(__name__)

AGAIN_S = 1.0
"""Without being told."""
TRIES, PAUSE_S = 8, 0.02
"""Looks, and the longest pause between two, for groups that another replica's look holds at this moment."""
END_S = 2.0
"""For a lease that is being made when the service ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A lease for a call: made now, or before under its `request_id`."""

    lease: Lease
    happened: Happened | None = None
    """Of a lease made now."""


class Nothing(Enum):
    """Why there is no lease yet."""

    YET = auto()
    """The caller goes on waiting."""
    DUE = auto()
    """A lease is over whose groups could be given out once it is ended."""
    TAKEN = auto()
    """There are more groups than were found: others are just looking at them, and may leave them."""


class Serving:
    """Owns the line of callers that wait here."""

    def __init__(
        self,
        store: SharedStore,
        policy: Policy,
        observer: Observer,
        new_id: Callable[[], str],
        give_back: Callable[[str], None],
        expire: Callable[[], Awaitable[int]],
    ) -> None:
        """`give_back`: release a lease whose making was not seen to its end, as soon as the store answers.

        `expire`: end leases whose time is over; how many.
        """
        self._store, self._policy, self._observer, self._new_id = store, policy, observer, new_id
        self._give_back, self._expire = give_back, expire
        self.line = Line()
        self.fresh: dict[str, Lease] = {}
        """Leases made here whose delivery nobody was told of yet."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="serving")

    async def stop(self) -> None:
        """Whoever waits is told `empty`; a lease that is being made is finished."""
        for waiter in self.line:
            if not waiter.decided:
                self.line.settle(waiter, LeaseStatus.EMPTY)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.line.settle_all(LeaseStatus.EMPTY)

    def join(self, waiter: Waiter) -> None:
        """Wait in the line, for the end of the next look even where the caller will not wait."""
        waiter.decided = True
        self.line.join(waiter)

    def look(self) -> None:
        """There may be something for those who wait."""
        if len(self.line):
            self._wake.set()

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # a signal may have been lost
            self._wake.clear()
            waiting = list(self.line)
            for waiter in waiting:
                waiter.decided = True
            try:
                while (first := self.line.first()) is not None and await self._serve(first):
                    pass
                for waiter in waiting:
                    if waiter.decided and not waiter.future.done():  # behind one for whom there is not enough
                        waiter.take_back()
            except Exception as error:  # a fault of ours must not leave everybody waiting for nothing
                log.exception("serving_raised")
                self.line.settle_all(StoreUnavailable(repr(error)))

    async def _serve(self, waiter: Waiter, tries: int = TRIES) -> bool:
        """Whether the wait of `waiter` is over."""
        waiter.decided = True  # whatever comes of this, its callers wait for it
        lease_id = self._new_id()
        making = asyncio.ensure_future(self._store.transact(partial(self._make, waiter.request, lease_id)))
        outcome: Made | Nothing | LeaseStatus | RolloutServiceError | None
        try:
            outcome = await asyncio.shield(making)
        except asyncio.CancelledError:
            outcome = await _ended(making)
            if isinstance(outcome, Made):
                self._made(waiter, outcome)
            raise
        except RolloutServiceError as error:
            outcome = error
            if isinstance(error, StoreUnavailable) and waiter.request.request_id is None:
                self._give_back(lease_id)  # it may have been made; under a request_id it can be asked for again
        except Exception as error:  # a fault of ours; the caller hears of it
            log.exception("lease_raised")
            outcome = StoreUnavailable(repr(error))
        if outcome is Nothing.DUE and await self._expired():
            return await self._serve(waiter, tries)
        if outcome is Nothing.TAKEN and tries > 0:
            await asyncio.sleep(random.uniform(0, PAUSE_S))  # noqa: S311 - parts those who took half each
            return await self._serve(waiter, tries - 1)
        if isinstance(outcome, Nothing):
            waiter.take_back()
            return False
        if isinstance(outcome, Made):
            self._made(waiter, outcome)
        elif isinstance(outcome, StoreUnavailable):
            self.line.settle_all(outcome)  # or each of them would wait for as long as the store takes to fail
        else:
            self.line.settle(waiter, outcome)
        return True

    async def _expired(self) -> bool:
        """Whether leases whose time was over gave something back just now."""
        try:
            return await self._expire() > 0
        except StoreUnavailable:
            return False  # whoever keeps house tries again

    def _made(self, waiter: Waiter, made: Made) -> None:
        lease = made.lease
        if made.happened is not None:
            made.happened.tell(self._observer)
            over = [key for key, old in self.fresh.items() if old.expires_at <= lease.created_at]
            for key in over:  # nobody has fetched them here
                del self.fresh[key]
            self.fresh[lease.lease_id] = lease
        self.line.grant(waiter, lease)
        self.line.settle(waiter, lease)
        if not waiter.callers and waiter.request.request_id is None:  # nobody is there to take it (design 4.2)
            self._give_back(lease.lease_id)

    async def _make(
        self, request: LeaseRequest, lease_id: str, tx: Transaction
    ) -> Made | Nothing | LeaseStatus | Halted:
        known = await known_lease(tx, request)
        if known is not None:
            return Made(lease=known)
        policy, version = self._policy, tx.run.run.policy_version
        paced = await parts.paced(tx, policy)
        oldest = version - policy.group.max_staleness
        ready = await tx.ready(request.max_groups, oldest=oldest)
        core = parts.load(tx, policy, groups=ready, paced=paced)
        stuck = core.stuck_by_pace
        lease = core.lease(
            lease_id,
            max_groups=request.max_groups,
            min_groups=request.min_groups,
            lease_s=request.lease_s,
            request_id=request.request_id,
            consumer=request.consumer,
            now=tx.now,
        )
        if lease is None:
            if stuck and tx.run.pace_relaxed != version:
                await tx.hold_run()
                await tx.set_run(replace(tx.run, pace_relaxed=version))
                tx.signal(Signal.PENDING)
            end = end_of_wait(core)
            if end is not None:
                return end
            if await tx.leases_due(1):
                return Nothing.DUE
            return Nothing.TAKEN if len(ready) < tx.whole.counts[GroupState.READY] else Nothing.YET
        happened, _ = await parts.write(tx, core, policy)
        tx.signal(Signal.PENDING)  # what is leased makes room to open more
        return Made(lease=lease, happened=happened)


async def known_lease(tx: Transaction, request: LeaseRequest) -> Lease | None:
    """The live lease of this `request_id`. Raises Conflict where it has ended or was asked for otherwise."""
    if request.request_id is None:
        return None
    lease = await tx.lease_by_request(request.request_id)
    if lease is None:
        return None
    if lease.state is not LeaseState.LIVE or lease.expires_at <= tx.now:
        raise Conflict(
            f"request_id {request.request_id!r} made lease {lease.lease_id}, which has ended; "
            "a new lease needs a new request_id",
            lease_id=lease.lease_id,
        )
    check_same_request((lease.max_groups, lease.min_groups, lease.lease_s), request, lease)
    return lease


async def _ended(
    making: asyncio.Future[Made | Nothing | LeaseStatus | Halted],
) -> Made | Nothing | LeaseStatus | RolloutServiceError | None:
    """The end of a transaction that runs on though its caller was cancelled."""
    try:
        async with asyncio.timeout(END_S):
            return await making
    except RolloutServiceError as error:
        return error
    except TimeoutError:
        return None
