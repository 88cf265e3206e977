"""An event loop whose time is a number: a sleep costs nothing, and the same program gives the same run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run and jumps to the next timer when nothing can."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:  # the one place where the base class would wait
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # private to asyncio's base loop
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]  # as above
        super()._run_once()  # type: ignore[misc]  # as above


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop of its own and cancel what it left behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
