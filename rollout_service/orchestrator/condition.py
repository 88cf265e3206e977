"""Something that has to last before anybody acts on it.

What always holds: it is measured by a clock that nobody sets; one that stops holding begins anew.
"""

from __future__ import annotations

Steady = float
"""Seconds, by such a clock."""


class Condition:
    """Holds or does not, each time it is looked at."""

    def __init__(self) -> None:
        self._since: Steady | None = None

    def lasted(self, holds: bool, seconds: float, now: Steady) -> bool:
        """Whether it has held for so long; then it begins anew."""
        if not holds:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if now - self._since < seconds:
            return False
        self._since = None
        return True

    def left(self, seconds: float, now: Steady) -> float | None:
        """Seconds until it will have held for so long; None where it does not hold."""
        return None if self._since is None else self._since + seconds - now
