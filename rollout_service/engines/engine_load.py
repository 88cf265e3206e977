"""How loaded one engine is, and how many requests it may have: our own count, and what it reports of itself.

What always holds: what an engine reported counts for `STALE_AFTER_S` and not longer; an engine without `/metrics`, or
whose page cannot be read, is judged by our own count alone; a static limit never changes but by an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import structlog

from rollout_service.engines.faults import EngineFault, StatusFault
from rollout_service.engines.limits import AdaptiveLimit
from rollout_service.engines.loads import LoadReport, read_load
from rollout_service.engines.routing import FULL_KV

METRICS_TIMEOUT_S = 2.0
"""A page takes 6 to 50 ms; an engine too busy to answer in this time is told about by its requests."""
STALE_AFTER_S = 15.0

Limit = int | Literal["auto"]

log = structlog.get_logger(__name__)


class Control(Protocol):
    """The control routes of an engine."""

    @property
    def url(self) -> str: ...

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        """The body of the answer. Raises EngineFault for everything but 200."""


class EngineLoad:
    """The load of one engine."""

    def __init__(self, limit: Limit, ceiling: int, *, clock: Callable[[], float]) -> None:
        """`limit`: requests at once, or "auto": as many as it bears, `ceiling` at most."""
        self.in_flight = 0
        """Our requests there."""
        self.given = 0
        """Requests it was ever given."""
        self.report: LoadReport | None = None
        """What it reported last; None: nothing, or nothing lately."""
        self.readable = True
        """Whether `/metrics` is worth asking for."""
        self._clock = clock
        self._read_at = 0.0
        self._foreign = 0
        self._static, self._adaptive = _limits(limit, ceiling)

    @property
    def auto(self) -> bool:
        return self._adaptive is not None

    @property
    def limit(self) -> int:
        """Requests it may have at once, >= 1."""
        return self._static if self._adaptive is None else self._adaptive.value

    @property
    def foreign(self) -> int:
        """Requests of others, as it last reported."""
        return self._foreign if self._known else 0

    @property
    def pressed(self) -> bool:
        """It reports requests that wait, or a KV cache that is nearly full."""
        report = self.report
        return report is not None and self._known and (report.waiting > 0 or report.kv_usage >= FULL_KV)

    @property
    def _known(self) -> bool:
        return self.report is not None and self._clock() - self._read_at <= STALE_AFTER_S

    def set_limit(self, limit: Limit, ceiling: int) -> bool:
        """From now on; whether it is another than before."""
        if limit == "auto" and self._adaptive is not None and self._adaptive.ceiling == ceiling:
            return False
        before = (self.auto, self.limit)
        self._static, self._adaptive = _limits(limit, ceiling)
        return (self.auto, self.limit) != before

    def refused(self) -> bool:
        """It said that it has too many (429, 503); whether its limit is another now."""
        before = self.limit
        if self._adaptive is not None:
            self._adaptive.refused(self.in_flight)
        return self.limit != before

    def restarted(self) -> None:
        """It may be another server than before."""
        self.readable = True
        self.report = None
        self._foreign = 0
        if self._adaptive is not None:
            self._adaptive = AdaptiveLimit(self._adaptive.ceiling)

    async def look(self, engine: Control) -> bool:
        """Read its `/metrics`; whether its limit is another now."""
        try:
            raw = await engine.control("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)
        except EngineFault as fault:
            if isinstance(fault, StatusFault) and fault.status in (401, 403, 404, 405):
                self.readable = False
                tell = log.warning if self.auto else log.info
                tell("engine_reports_no_load", engine=engine.url, error=str(fault), max_inflight=self.limit)
            return False
        report = read_load(raw)
        if report is None:
            return False
        before = self.limit
        self.report, self._read_at = report, self._clock()
        self._foreign = max(0, report.running + report.waiting - self.in_flight)
        if self._adaptive is not None:
            self._adaptive.observe(report, self.in_flight)
        return self.limit != before

    def describe(self) -> dict[str, Any]:
        report = self.report if self._known else None
        return {
            "max_inflight": self.limit,
            "auto": self.auto,
            "running": None if report is None else report.running,
            "waiting": None if report is None else report.waiting,
            "kv_usage": None if report is None else report.kv_usage,
        }


def _limits(limit: Limit, ceiling: int) -> tuple[int, AdaptiveLimit | None]:
    return (ceiling, AdaptiveLimit(ceiling)) if limit == "auto" else (limit, None)
