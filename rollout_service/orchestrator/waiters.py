"""Lease calls that wait, first come first served.

What always holds: callers with one `request_id` share one waiter and so one lease; a waiter leaves the line when it is
granted, when it is told how it ended, or when its last caller has gone; nobody overtakes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from rollout_service.core.group import Lease
from rollout_service.orchestrator.views import LeaseRequest, LeaseStatus


class HungUp(Exception):
    """The caller has gone before there was an answer; nothing is held for it."""


Outcome = Lease | LeaseStatus
"""How a wait ends: a committed lease, or `empty` / `exhausted`."""


class Waiter:
    """One place in the line."""

    def __init__(self, request: LeaseRequest) -> None:
        self.request = request
        self.callers = 0
        self.granted: Lease | None = None
        """The lease, once it is made; the one writer has yet to commit it then."""
        self.decided = False
        """How the wait ends is being decided, and told soon: the end of its time does not end it."""
        self._future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._undecided: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def future(self) -> asyncio.Future[Outcome]:
        return self._future

    @property
    def leased(self) -> Lease | None:
        """The lease that was told, if one was."""
        if not self._future.done() or self._future.cancelled() or self._future.exception() is not None:
            return None
        outcome = self._future.result()
        return outcome if isinstance(outcome, Lease) else None

    @property
    def undecided(self) -> asyncio.Future[None]:
        """Done when what seemed decided came to nothing, and the wait goes on."""
        return self._undecided

    def take_back(self) -> None:
        """What seemed decided came to nothing."""
        self.decided = False
        self._undecided.set_result(None)
        self._undecided = asyncio.get_running_loop().create_future()

    def tell(self, outcome: Outcome) -> None:
        if not self._future.done():
            self._future.set_result(outcome)

    def fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # a waiter all of whose callers have gone is no forgotten error


class Line:
    """The waiters in order of arrival, and those granted but not yet told."""

    def __init__(self) -> None:
        self._waiting: deque[Waiter] = deque()
        self._granted: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiting))

    def first(self) -> Waiter | None:
        return self._waiting[0] if self._waiting else None

    def by_request(self, request_id: str) -> Waiter | None:
        for waiter in (*self._granted, *self._waiting):
            if waiter.request.request_id == request_id:
                return waiter
        return None

    def join(self, waiter: Waiter) -> None:
        self._waiting.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def grant(self, waiter: Waiter, lease: Lease) -> None:
        """The core made its lease; it goes out when that is committed."""
        waiter.granted = lease
        waiter.decided = True
        self.leave(waiter)  # it may have left by itself, if its last caller went while the lease was made
        self._granted.append(waiter)

    def settle(self, waiter: Waiter, outcome: Outcome | Exception) -> None:
        """The wait is over."""
        self.leave(waiter)
        if waiter in self._granted:
            self._granted.remove(waiter)
        if isinstance(outcome, Exception):
            waiter.fail(outcome)
        else:
            waiter.tell(outcome)

    def settle_all(self, outcome: Outcome | Exception) -> None:
        for waiter in (*self._granted, *self._waiting):
            self.settle(waiter, outcome)

    async def wait(
        self,
        waiter: Waiter,
        wait_s: float,
        hung_up: Awaitable[None] | None,
        *,
        abandon: Callable[[Lease], Awaitable[None]],
        left: Callable[[], None],
    ) -> Outcome:
        """How `waiter`, who is in the line, is told it ended; `empty` after `wait_s`. One of its callers waits here.

        `abandon`: for a lease whose last caller has gone. `left`: the line is shorter by one. Raises HungUp where
        `hung_up` ends first, and what the waiter failed with.
        """
        gone = asyncio.ensure_future(hung_up) if hung_up is not None else None
        waiter.callers += 1
        try:
            waiting: set[asyncio.Future[Any]] = {waiter.future} if gone is None else {waiter.future, gone}
            done, _ = await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and waiter.decided:  # in time, but not yet on disk
                done, _ = await asyncio.wait({*waiting, waiter.undecided}, return_when=asyncio.FIRST_COMPLETED)
            if waiter.future in done:
                return waiter.future.result()
            if gone is not None and gone in done:
                raise HungUp
            return LeaseStatus.EMPTY
        except BaseException:
            if waiter.callers == 1 and waiter.leased is not None:
                await abandon(waiter.leased)  # it was granted in the moment its last caller went
            raise
        finally:
            if gone is not None and gone is not hung_up:
                gone.cancel()
            waiter.callers -= 1
            if not waiter.callers and waiter.granted is None:
                self.leave(waiter)
                left()  # the next in line may be content with what was too little for this one
