"""Changes in, commits out, effects after them.

What always holds: batches are committed one at a time in the order they were filled; an effect runs after the commit of
everything collected before it, and effects run in the order they were added, but for those of a commit that leave
first; when a commit fails, every effect not yet out is told so instead of run, and nothing more happens until
`restart`. Changes that arrive during a commit share the next one (group commit), and while nobody waits for a commit,
one begins `GATHER_S` after the last began at the soonest.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from rollout_service.core.records import Batch
from rollout_service.errors import StoreUnavailable

GATHER_S = 0.01
"""A sync and two changes of threads cost as much as a completion does; at 500 completions a second, each with its own
commit, they would be half of all there is to do. Little next to any generation, and an idle service never waits."""
BREATH_S = 0.01
"""For what has to leave at once, aborts, to have the event loop for itself: an abort call takes a few passes of it, and
the other effects of a bump are hundreds."""

log = structlog.get_logger(__name__)


class Commits(Protocol):
    """The one method of a store needed here."""

    async def commit(self, batch: Batch) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Pending:
    batch: Batch = field(default_factory=Batch)
    effects: list[tuple[Callable[[], None], Callable[[StoreUnavailable], None] | None]] = field(default_factory=list)

    first: list[Callable[[], None]] = field(default_factory=list)
    """Effects that leave before the others."""
    awaited: bool = False
    """Somebody waits for it."""

    def __bool__(self) -> bool:
        return bool(self.effects) or bool(self.first) or bool(self.batch)


class Committer:
    """Owns the batches between the core and the store."""

    def __init__(
        self,
        store: Commits,
        *,
        on_failure: Callable[[StoreUnavailable], None],
        on_commit: Callable[[float], None],
    ) -> None:
        self._store, self._on_failure, self._on_commit = store, on_failure, on_commit
        self._queue: deque[_Pending] = deque([_Pending()])
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        """Somebody waits for what is collected."""
        self._began = -math.inf
        self._busy = False
        self._failure: StoreUnavailable | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def batch(self) -> Batch:
        """The batch that changes go into now."""
        return self._queue[-1].batch

    @property
    def idle(self) -> bool:
        """Nothing is being committed and nothing waits for it."""
        return not self._busy and not any(self._queue)

    def seal(self) -> None:
        """What comes next is committed in a later transaction than what stands in `batch` now."""
        if self._queue[-1]:
            self._queue.append(_Pending())

    def after_commit(self, run: Callable[[], None], failed: Callable[[StoreUnavailable], None] | None = None) -> None:
        """Run `run` once everything collected so far is durable, or `failed` if it never will be."""
        if self._failure is not None:
            if failed is not None:
                failed(self._failure)
            return
        self._queue[-1].effects.append((run, failed))
        if failed is not None:
            self._queue[-1].awaited = True
            self._urgent.set()

    def after_commit_first(self, run: Callable[[], None]) -> None:
        """As `after_commit`, before every other effect of the same commit, which then wait `BREATH_S`."""
        if self._failure is None:
            self._queue[-1].first.append(run)

    async def committed(self) -> None:
        """Return once everything collected so far is durable. Raises StoreUnavailable."""
        if self.idle and self._failure is None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.after_commit(lambda: _resolve(done), lambda error: _reject(done, error))
        self.flush()
        await done

    def flush(self) -> None:
        """Have the commit begin, if none runs."""
        self._wake.set()

    def start(self) -> None:
        self._failure = None
        self._queue = deque([_Pending()])
        self._task = asyncio.create_task(self._work(), name="committer")

    async def stop(self, error: StoreUnavailable | None = None) -> None:
        """End at once; whoever waits for a commit whose end will not be seen is told `error`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lose(error or StoreUnavailable("the service ended before this was committed"))

    async def _work(self) -> None:
        while self._failure is None:
            await self._wake.wait()
            self._wake.clear()
            while self._queue[0]:
                await self._gather()
                pending = self._queue.popleft()
                if not self._queue:
                    self._queue.append(_Pending())
                if not any(later.awaited for later in self._queue):
                    self._urgent.clear()
                if not await self._commit(pending):
                    return

    async def _gather(self) -> None:
        """Let changes come together for a moment, unless somebody waits."""
        clock = asyncio.get_running_loop().time
        left = self._began + GATHER_S - clock()
        if left > 0 and not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._urgent.wait()
        self._began = clock()

    async def _commit(self, pending: _Pending) -> bool:
        self._busy = True
        try:
            if pending.batch:
                started = asyncio.get_running_loop().time()
                await self._store.commit(pending.batch)
                self._on_commit(asyncio.get_running_loop().time() - started)
        except asyncio.CancelledError:
            self._queue.appendleft(pending)  # for `stop`, which tells those who wait for it
            raise
        except StoreUnavailable as error:
            self._fail(pending, error)
            return False
        except Exception as error:  # a fault of ours must not be taken for a commit
            log.exception("commit_raised")
            self._fail(pending, StoreUnavailable(f"the store failed: {error!r}"))
            return False
        else:
            try:
                if pending.first:
                    _run(pending.first)
                    await asyncio.sleep(BREATH_S)
            finally:  # also where this ends in the pause: what is committed has happened
                _run(run for run, _ in pending.effects)
            return True
        finally:
            self._busy = False

    def _fail(self, pending: _Pending, error: StoreUnavailable) -> None:
        self._queue.appendleft(pending)
        self._lose(error)
        self._on_failure(error)

    def _lose(self, error: StoreUnavailable) -> None:
        """Nothing collected since the last commit happened; tell everybody who waits for it."""
        self._failure = error
        lost, self._queue = self._queue, deque([_Pending()])
        self._urgent.clear()
        for late in lost:
            for _, failed in late.effects:
                if failed is not None:
                    failed(error)


def _run(effects: Iterable[Callable[[], None]]) -> None:
    for run in effects:
        try:
            run()
        except Exception:  # one effect must not keep the others from leaving
            log.exception("effect_raised")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reject(future: asyncio.Future[None], error: StoreUnavailable) -> None:
    if not future.done():
        future.set_exception(error)
