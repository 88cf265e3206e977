"""How the garbage collector runs in a process with thousands of generations in flight.

A full collection looks at every object that is alive: with 4,096 rollouts in flight it stops the event loop for tenths
of a second, and by Python's defaults it comes every few seconds, because what is in flight outlives the young
generations. Almost nothing waits for it: values are freed by their reference counts, all but the tracebacks of what was
aborted. What always holds once `tame` was called: what was alive then is never looked at again; a full collection comes
every `FULL_S`, and after `ABORTS` aborted rollouts, and not sooner.
"""

from __future__ import annotations

import asyncio
import gc

from rollout_service.observers import Quiet

YOUNG, MIDDLE = 5_000, 5
"""Objects until a young collection, and young ones until a middle one: some milliseconds at most each."""
NEVER = 2**31 - 1
FULL_S = 60.0
ABORTS = 4_000
"""Each leaves some 20 KB in cycles: 80 MB at most wait for a collection."""
SETTLE_S = 1.0
"""Aborting has to be over, and its connections closed, before there is something to collect."""


def tame() -> None:
    """To be called once, when everything that lives as long as the process is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


class Collector(Quiet):
    """Collects while `run` runs."""

    def __init__(self) -> None:
        self._aborted = 0
        self._due = asyncio.Event()

    def rollouts_aborted(self, count: int) -> None:
        self._aborted += count
        if self._aborted >= ABORTS:
            self._due.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                async with asyncio.timeout(FULL_S):
                    await self._due.wait()
                    await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                pass  # nothing aborted, and still something that became old
            self._due.clear()
            self._aborted = 0
            gc.collect()
