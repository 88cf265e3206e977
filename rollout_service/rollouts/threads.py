"""Threads for code of the user's that blocks: a bounded number, each with a place of its own.

What always holds: a place is free only when its thread has really ended, so no more threads run than there are places;
a thread that was told to end and goes on past the grace period is *stuck*: its place is made good by a new one, at most
as many times as there were places at first, so that code that never ends cannot make threads without limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadCounts:
    """Threads at one moment."""

    total: int
    """Places for threads that are not stuck."""
    busy: int
    stuck: int
    """Told to end more than the grace period ago, and still running."""
    waiting: int
    """Calls that wait for a place."""


class NoThreads(Exception):
    """Every place is lost to a thread that ignores its end; none will be free."""


class _Job:
    __slots__ = ("cancelled", "done", "made_good", "stuck")

    def __init__(self) -> None:
        self.cancelled = False
        self.done = False
        self.stuck = False
        self.made_good = False


class Threads:
    """Runs blocking calls. All methods belong to the event loop."""

    def __init__(self, places: int, *, grace_s: float) -> None:
        self._places = places
        self._grace_s = grace_s
        self._free = places
        self._stuck = 0
        self._made_good = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    def counts(self) -> ThreadCounts:
        lost = self._stuck - self._made_good
        total = self._places - lost
        return ThreadCounts(
            total=total, busy=total - self._free, stuck=self._stuck, waiting=sum(not w.done() for w in self._queue)
        )

    async def run(self, call: Callable[[], Any], *, name: str, started: Callable[[], None] = lambda: None) -> Any:
        """What `call` returns or raises, made in a thread of its own.

        Cancelling returns at once; the thread has to be told by other means (a CancelToken), and keeps its place until
        it ends. `started` is called when a place was found.
        """
        await self._acquire()
        job = _Job()
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # what the thread asks of the loop belongs to the same rollout
        outcome: asyncio.Future[Any] = loop.create_future()

        def body() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # whatever user code raises, SystemExit included, belongs to the caller
                error = raised
            with suppress(RuntimeError):  # the loop has closed: the service ended while this thread went on
                loop.call_soon_threadsafe(self._ended, job, outcome, result, error)

        started()
        try:
            # Daemon: a thread that never ends must not keep the process from ending.
            threading.Thread(target=context.run, args=(body,), name=name, daemon=True).start()
        except RuntimeError:
            self._release()
            raise
        try:
            return await outcome
        except asyncio.CancelledError:
            if not job.done:
                job.cancelled = True
                loop.call_later(self._grace_s, self._grace_over, job, name)
            raise

    def _ended(self, job: _Job, outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        job.done = True
        if job.stuck:
            self._stuck -= 1
        if job.made_good:
            self._made_good -= 1
        else:
            self._release()
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, StopIteration | asyncio.CancelledError):  # a future cannot carry these
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            outcome.set_exception(error)

    def _grace_over(self, job: _Job, name: str) -> None:
        if job.done:
            return
        job.stuck = True
        self._stuck += 1
        job.made_good = self._made_good < self._places
        log.warning("thread_ignores_its_end", thread=name, stuck=self._stuck, made_good=job.made_good)
        if job.made_good:
            self._made_good += 1
            self._release()
        elif self._all_lost:
            for place in self._queue:
                if not place.done():
                    place.set_exception(self._no_threads())
            self._queue.clear()

    @property
    def _all_lost(self) -> bool:
        return self._stuck - self._made_good >= self._places

    def _no_threads(self) -> NoThreads:
        return NoThreads(
            f"{self._stuck} threads ignore their end and no place is left (program.threads = {self._places}): restart, "
            "and have the program end within program.grace_s of ctx.cancelled"
        )

    async def _acquire(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        if self._all_lost:
            raise self._no_threads()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release()  # it was given in the same moment
            with suppress(ValueError):
                self._queue.remove(place)
            raise

    def _release(self) -> None:
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
