"""The service's Prometheus page as entries of TRL's log. Pure.

TRL sums a name that contains the word `total` over the steps it logs, so counters are given as what was added since the
last reading, and a restart of the service, which starts its counters again at 0, never shows as a negative number.
"""

from __future__ import annotations

import re

COUNTERS = ("failed_total", "dropped_groups_total", "stale_groups_total")
GAUGES = {
    "rollout/ready_groups": ("rollout_groups", 'state="ready"'),
    "rollout/inflight_rollouts": ("rollout_inflight_rollouts", ""),
}


class Deltas:
    """Counters between two readings."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, name: str, now: float) -> float:
        """What was added since the last reading; 0.0 at the first."""
        before = self._before.get(name, now)
        self._before[name] = now
        return now - before if now >= before else now


def of_service(page: str, deltas: Deltas) -> dict[str, float]:
    """What was added to each counter, summed over its labels, under the names `rollout/failed_total` and so on; and the
    gauges as they are."""
    counted = {f"rollout/{name}": deltas.of(name, total(page, f"rollout_{name}")) for name in COUNTERS}
    return counted | {name: total(page, series, label) for name, (series, label) in GAUGES.items()}


def total(page: str, name: str, label: str = "") -> float:
    """Sum over the samples of `name` whose labels contain `label`; 0.0 where there are none."""
    found = re.findall(rf"^{name}(\{{.*\}})? (\S+)", page, re.MULTILINE)
    return sum((float(value) for labels, value in found if label in labels), 0.0)
