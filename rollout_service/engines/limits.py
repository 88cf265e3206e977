"""How many requests an engine gets at once where `max_inflight` is "auto". Pure.

Additive increase, multiplicative decrease. What always holds: the limit stays between `FLOOR` (or a lower ceiling) and
the ceiling; it grows only while it is used and the engine has room; it is lowered at most once until what is in flight
has come down to it, so that one full queue lowers it once and not at every look. Between room and too much lies a band
where it stays as it is: in a steady load it comes to rest there and does not swing.
"""

from __future__ import annotations

from rollout_service.engines.loads import LoadReport

FIRST = 64
"""The limit of an engine nobody knows yet: a few groups, which any engine takes, and 14 s away from 256."""
FLOOR = 4
"""Below that an engine would not even batch, and a queue that others fill would take it away from us altogether."""
STEP = 16
"""Requests the limit grows by in one look: about a group. A small limit grows by one in `QUEUE` instead."""
DECREASE = 0.75
"""What a decrease leaves. Waiting costs latency and no work, so half, as in networks, would idle more than it saves."""
USED = 0.9
"""The share of the limit that is in flight while it is what holds us back."""
QUEUE = 8
"""One in so many may wait: a group arrives in one piece and waits for the next step of the scheduler. And no step up
from a limit at which nothing waited goes beyond it."""
KV_ROOM = 0.8
"""The cache is used less than this: there is room for more. What is in flight still grows by its completions."""
KV_FULL = 0.95
"""The cache is used more than this: the next steps preempt, and what is preempted is computed again."""


class AdaptiveLimit:
    """The limit of one engine. Make another for another engine, or when it was restarted with other limits."""

    def __init__(self, ceiling: int) -> None:
        """`ceiling`: >= 1; beyond it the limit never grows."""
        if ceiling < 1:
            raise ValueError(f"a ceiling of {ceiling} lets nothing through")
        self._ceiling = ceiling
        self._floor = min(FLOOR, ceiling)
        self._value = min(FIRST, ceiling)
        self._settled = True
        """What is in flight has come down to the limit since it was lowered."""
        self._preemptions: int | None = None

    @property
    def value(self) -> int:
        """Requests at once, now."""
        return self._value

    @property
    def ceiling(self) -> int:
        return self._ceiling

    def observe(self, report: LoadReport, in_flight: int) -> int:
        """The new limit, after a look at the engine; `in_flight`: our own requests there when it was looked at.

        An engine that is paused or loads weights reports a load that is old: do not observe it.
        """
        # What was preempted while too much was still coming down has been answered for already.
        preempted = self._preempted(report) and self._settled
        self._settled = self._settled or in_flight <= self._value
        if in_flight == 0:
            return self._value  # its load is somebody else's
        if preempted or report.kv_usage > KV_FULL or report.waiting > max(1, self._value // QUEUE):
            self._decrease()
        elif report.waiting == 0 and report.kv_usage < KV_ROOM and USED * self._value <= in_flight <= self._value:
            self._value = min(self._ceiling, self._value + max(1, min(STEP, self._value // QUEUE)))
        return self._value

    def refused(self, in_flight: int) -> int:
        """The new limit, after the engine answered 429 or 503 to a request; `in_flight`: our own requests there."""
        self._settled = self._settled or in_flight <= self._value
        self._decrease()
        return self._value

    def _preempted(self, report: LoadReport) -> bool:
        last, self._preemptions = self._preemptions, report.preemptions
        # The first look says nothing of when they were; a smaller count is that of an engine that was restarted.
        return last is not None and report.preemptions > last

    def _decrease(self) -> None:
        if self._settled:
            self._settled = False
            self._value = max(self._floor, int(self._value * DECREASE))
