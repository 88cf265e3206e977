"""The engine's own text of prompts given as ids.

What always holds: one distinct prompt is asked for once, however many rollouts want it at the same time; what is kept
is bounded in bytes; a caller that is cancelled takes nothing from the others. A failure is not kept.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable

MAX_BYTES = 64 * 2**20
"""Keys and texts kept, roughly."""


class PromptTexts:
    """`fetch(ids)` asks an engine, and gives None where none can tell."""

    def __init__(self, fetch: Callable[[array[int]], Awaitable[str | None]], *, max_bytes: int = MAX_BYTES) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}

    def want(self, ids: array[int]) -> None:
        """Ask for it now, so that `get` finds it later."""
        key = ids.tobytes()
        if key not in self._kept:
            self._ask(key, ids)

    async def get(self, ids: array[int]) -> str | None:
        key = ids.tobytes()
        text = self._kept.get(key)
        if text is not None:
            self._kept.move_to_end(key)
            return text
        return await asyncio.shield(self._ask(key, ids))

    async def close(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ask(self, key: bytes, ids: array[int]) -> asyncio.Task[str | None]:
        task = self._asked.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetched(key, ids), name="prompt-text")
            self._asked[key] = task
        return task

    async def _fetched(self, key: bytes, ids: array[int]) -> str | None:
        try:
            text = await self._fetch(ids)
        finally:
            del self._asked[key]
        if text is not None:
            self._kept[key] = text
            self._bytes += len(key) + len(text)
            while self._bytes > self._max_bytes:
                old_key, old = self._kept.popitem(last=False)
                self._bytes -= len(old_key) + len(old)
        return text
