"""Abort ids on their way to one engine.

What always holds: the ids added within one turn of the event loop leave in ONE call; an empty list is never sent (it
aborts everything on the server); an id that was young is sent once more, because an abort that overtakes its request
leaves no mark at the engine. A failing call is logged and counted, never raised: closing the connection is the other
half of every abort.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

YOUNG_S = 1.0
"""A request sent less than this ago may still be on its way when its abort arrives."""
AGAIN_AFTER_S = 0.3
"""When the ids of young requests are sent once more: a busy engine has read its sockets by then."""
CALL_TIMEOUT_S = 5.0
"""Bound of one abort call; 64 aborts at once take vLLM 0.2 s."""

log = structlog.get_logger(__name__)


class AbortEvents(Protocol):
    """What a batch counts."""

    def abort_issued(self, count: int) -> None: ...

    def abort_failed(self, count: int) -> None: ...


class AbortBatch:
    """Collects abort ids and hands each batch to `send(ids)`, which raises when the call failed."""

    def __init__(
        self, send: Callable[[list[str]], Awaitable[None]], events: AbortEvents, *, clock: Callable[[], float], url: str
    ) -> None:
        self._send = send
        self._events = events
        self._clock = clock
        self._url = url
        self._waiting: list[str] = []
        self._young: list[str] = []
        self._timers: deque[asyncio.TimerHandle] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._closed = False

    def add(self, abort_id: str, sent_at: float) -> None:
        """Have `abort_id` aborted; `sent_at`: when its request was sent, by the clock. No effect after `close`."""
        if self._closed:
            return
        self._waiting.append(abort_id)
        if self._clock() - sent_at < YOUNG_S:
            self._young.append(abort_id)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def now(self, ids: Sequence[tuple[str, float]]) -> None:
        """As `add` for each (abort id, when it was sent), and at once; returns when that call has ended."""
        for abort_id, sent_at in ids:
            self.add(abort_id, sent_at)
        if not self._closed and (call := self._flush()) is not None:
            await asyncio.shield(call)

    async def close(self, within_s: float = CALL_TIMEOUT_S) -> None:
        """Send what waits, and wait for the calls that are out, `within_s` at most."""
        self._closed = True
        if self._waiting:
            self._flush()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._calls:
            _, late = await asyncio.wait(self._calls, timeout=within_s)
            for call in late:
                call.cancel()

    def _flush(self) -> asyncio.Task[None] | None:
        self._scheduled = False
        ids, self._waiting = self._waiting, []
        young, self._young = self._young, []
        if not ids:
            return None  # close(), or now(), was faster
        self._events.abort_issued(len(ids))
        if young:
            self._timers.append(asyncio.get_running_loop().call_later(AGAIN_AFTER_S, self._again, young))
        return self._call(ids)

    def _again(self, ids: list[str]) -> None:
        self._timers.popleft()  # all timers wait equally long, so they end in the order they were made
        self._call(ids)

    def _call(self, ids: list[str]) -> asyncio.Task[None]:
        call = asyncio.get_running_loop().create_task(self._sent(ids), name="engine-abort")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _sent(self, ids: list[str]) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._send(ids)
        except Exception as error:
            # Closing the connection aborts too, so this costs the engine work at worst.
            self._events.abort_failed(len(ids))
            log.warning("engine_abort_failed", engine=self._url, requests=len(ids), error=_words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
