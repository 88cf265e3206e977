"""Who watches the live view, and the line they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

LOOK_S = 0.25
"""As often as a person can follow."""
MAX_VIEWERS = 64


class Viewers:
    """Of one service, on its event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._end = asyncio.Event()
        self._line = b""
        self._made_at = float("-inf")

    @property
    def closed(self) -> bool:
        return self._end.is_set()

    def close(self) -> None:
        """Every stream ends."""
        self._end.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    async def pause(self, seconds: float) -> None:
        """Sleep, or less where all is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), seconds)

    def line(self, make: Callable[[], bytes]) -> bytes:
        """What `make` gives; a line made a moment ago serves several viewers."""
        now = asyncio.get_running_loop().time()
        if now - self._made_at >= LOOK_S / 2:
            self._line = make()
            self._made_at = now
        return self._line
