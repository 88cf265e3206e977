"""How a program learns that its rollout is over: staleness, the deadline, a shutdown.

What always holds: a token is set once and stays set; everything attached to it when it is set, or later, is cancelled,
so that a thread waiting in an engine call wakes at once and never waits again.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


class RolloutCancelled(BaseException):
    """The rollout is over; nothing it makes from here on is used. Raised by every `ctx` call.

    A BaseException, like asyncio.CancelledError, so that a program's `except Exception` around a flaky tool does not
    swallow it.
    """


class CancelToken:
    """One rollout's. Used from the event loop and from the program's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._waits: set[Future[Any]] = set()

    @property
    def reason(self) -> str | None:
        """Why the rollout is over; None while it is not."""
        return self._reason

    def set(self, reason: str) -> None:
        """The rollout is over."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            waits, self._waits = self._waits, set()
        for wait in waits:
            wait.cancel()

    def check(self) -> None:
        """Raise RolloutCancelled where the rollout is over."""
        if self._reason is not None:
            raise RolloutCancelled(self._reason)

    def attach(self, wait: Future[Any]) -> None:
        """Have `wait` cancelled together with the rollout."""
        with self._lock:
            if self._reason is None:
                self._waits.add(wait)
                return
        wait.cancel()

    def detach(self, wait: Future[Any]) -> None:
        with self._lock:
            self._waits.discard(wait)
