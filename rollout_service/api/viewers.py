"""Who watches the live view, and the line they share.

What always holds: there are never more than MAX_VIEWERS, and a viewer that has left has given its place back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from rollout_service.errors import TooManyViewers

LOOK_S = 0.25
"""As often as a person can follow."""
MAX_VIEWERS = 64


class Viewers:
    """Of one service, on its event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._end = asyncio.Event()
        self._line = b""
        self._serial = -1
        self._made_at = float("-inf")

    @property
    def closed(self) -> bool:
        return self._end.is_set()

    def close(self) -> None:
        """Every stream ends."""
        self._end.set()

    def enter(self) -> None:
        """Take a place; `leave` gives it back. Raises TooManyViewers."""
        if self.count >= MAX_VIEWERS:
            raise TooManyViewers(f"{MAX_VIEWERS} viewers are there already", retry_after_s=5)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1

    async def pause(self, seconds: float) -> None:
        """Sleep, or less where all is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), seconds)

    def line(self, serial: int, make: Callable[[], bytes]) -> tuple[int, bytes]:
        """A line, and the serial it was made at; one made a moment ago serves several viewers."""
        now = asyncio.get_running_loop().time()
        if now - self._made_at >= LOOK_S / 2:
            self._line, self._serial = make(), serial
            self._made_at = now
        return self._serial, self._line
