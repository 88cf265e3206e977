"""The gate every engine request passes: closed while the run is paused, halted or ending."""

from __future__ import annotations

import asyncio


class PauseGate:
    """Satisfies parts.Gate."""

    def __init__(self) -> None:
        self._open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def set(self, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def passed(self) -> float:
        """Return once the gate is open; the seconds that took, so that a deadline can leave them out."""
        if self._open.is_set():
            return 0.0
        clock = asyncio.get_running_loop().time
        since = clock()
        while not self._open.is_set():  # it may close again between the wake-up and our turn
            await self._open.wait()
        return clock() - since
