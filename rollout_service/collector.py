"""How the garbage collector runs in a process with thousands of generations in flight.

Python's collector looks again and again at what was made lately and is still alive, which here is thousands of requests
that wait: at 4,096 in flight that took a fifth of a core, up to a quarter of a second at a time, and found nothing, for
a generation that succeeds leaves no cycles. What leaves them is aborted and failed work (tracebacks). So what always
holds once `tame` was called is: collections come from `Collector` alone, when there is something to collect: every
`FULL_S`, after `ABORTS` aborted rollouts, and when `GROWTH` more objects are alive than after the last one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from rollout_service.observers import Quiet

LOOK_S = 1.0
FULL_S = 60.0
ABORTS = 4_000
"""Each leaves some 20 KB in cycles: 80 MB at most wait for a collection."""
GROWTH = 500_000
"""Objects that can be part of a cycle: 100 MB or so, made by code of a program that leaves cycles behind, say."""


def tame() -> None:
    """To be called once, when everything is there that lives as long as the process: it is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Collector(Quiet):
    """Collects while `run` runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._aborted = 0
        self._last = clock()

    def rollouts_aborted(self, count: int) -> None:
        self._aborted += count

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Collect if it is time; whether it was."""
        now = self._clock()
        if self._aborted < ABORTS and now - self._last < FULL_S and gc.get_count()[0] < GROWTH:
            return False
        self._aborted = 0
        gc.collect()
        self._last = now
        return True
