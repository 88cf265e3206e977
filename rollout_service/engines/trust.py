"""What the requests of an engine say for or against it. Pure.

What always holds: one that succeeds ends every doubt; only transport errors and 5xx take an engine out (design 3.2.5):
`STRIKES` without a success between them, or one where it was taken out so before and nothing has succeeded since;
failures of any other kind make it doubtful at most. A probe that finds the engine down explains what failed before.
"""

from __future__ import annotations

import math

STRIKES = 3
"""Transport errors or 5xx in a row that take an engine out (design 3.2.5)."""
DOUBTS = 3
"""Failures of any kind in a row after which an engine gets one request at a time while others can: a fleet must not
lose its prompts to one server that refuses everything at once and is therefore always the least loaded."""
TRIAL_S, LONGEST_TRIAL_S = 0.5, 8.0
"""Before one more request finds out whether it works again, and twice as long after each that failed: one at a time is
still a thousand a second where each fails at once."""


class Trust:
    """In one engine."""

    def __init__(self) -> None:
        self.strikes = 0
        """Transport errors or 5xx in a row."""
        self.failures = 0
        """Failures of any kind in a row."""
        self._suspect = False
        self.rests_until = -math.inf
        """When it may be tried again, on the clock that `failed` is told of."""

    @property
    def doubtful(self) -> bool:
        """Half-open: it gets one request at a time while others can, until one succeeds."""
        return self._suspect or self.failures >= DOUBTS

    def may_try(self, now: float) -> bool:
        """Whether that one request may be made now; `now` on the clock that `failed` is told of."""
        return now >= self.rests_until

    def succeeded(self) -> None:
        self.strikes = self.failures = 0
        self._suspect = False

    def failed(self, now: float) -> None:
        """`now`: seconds, on any clock that does not go back."""
        self.failures += 1
        if self.doubtful:
            again = min(16, max(0, self.failures - DOUBTS))
            self.rests_until = now + min(LONGEST_TRIAL_S, TRIAL_S * 2.0**again)

    def struck(self) -> bool:
        """A transport error or a 5xx; whether the engine is to be taken out for it."""
        self.strikes += 1
        if self.strikes < (1 if self._suspect else STRIKES):
            return False
        self._suspect = True
        return True

    def back(self) -> None:
        """It is used again, on a probe's word: what struck it before counts no more."""
        self.strikes = 0

    def down(self) -> None:
        """A probe failed: it was down, which says nothing against it once it is up."""
        self._suspect = False
        self.failures = 0
