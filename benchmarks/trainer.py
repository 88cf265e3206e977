"""A trainer that does nothing but its REST calls: some ranks lease in binary, ack, count. Prints one JSON line.

    python -m benchmarks.trainer URL SERVICE_PID WARM_UP_S WINDOW_S MIN_GROUPS IN_FLIGHT

Completions are counted when their group's ack was answered, and when their rollout finished; the lower count is given,
for groups that had piled up before the window are no work of it. The window begins WARM_UP_S after the start and not
before IN_FLIGHT completions were acked (bounded in time). Several ranks call side by side, as data-parallel trainers
do: one alone would measure how long its own two calls take. The event-loop lag is the service's own histogram over the
window, its p99 interpolated inside the bucket, as Prometheus does it.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from dataclasses import dataclass

import httpx

from benchmarks.load import GROUP, MOST_WARM_UP, Run, Times
from benchmarks.processes import cpu_seconds, helpers_cpu_seconds
from trainer_client.binary import ACCEPT, decode_lease

RANKS = 4
MAX_GROUPS = 64
"""At most, or all that is in flight where that is more."""
WAIT_S = 5
_FINISHED = re.compile(r"^rollout_finished_total (\S+)$", re.MULTILINE)
_BUCKET = re.compile(r'^rollout_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)

Buckets = dict[float, float]
"""Upper bound in seconds → samples at or below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where the counters stood."""

    acked: int
    finished: int
    cpu_s: float
    helpers_s: float
    lags: Buckets
    at: float


def lag_buckets(page: str) -> Buckets:
    """The lag histogram of a /metrics page."""
    return {math.inf if bound == "+Inf" else float(bound): float(count) for bound, count in _BUCKET.findall(page)}


def quantile(before: Buckets, after: Buckets, share: float) -> float:
    """The `share` quantile of what was counted in between, seconds; NaN where nothing was."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if not counts or counts[-1][1] <= 0:
        return math.nan
    rank = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            return lower if bound == math.inf else lower + (bound - lower) * (rank - below) / max(1.0, count - below)
        lower, below = bound, count
    return math.nan


def train(http: httpx.Client, min_groups: int, max_groups: int) -> int:
    """One lease and its ack; the number of completions."""
    body = {"max_groups": max_groups, "min_groups": min_groups, "wait_s": WAIT_S}
    answer = http.post("/leases", json=body, headers={"accept": ACCEPT}).raise_for_status()
    lease = decode_lease(answer.content)
    if not lease.groups:
        return 0
    http.post(f"/leases/{lease.lease_id}/ack").raise_for_status()
    return sum(len(group.samples) for group in lease.groups)


class Rank(threading.Thread):
    """Leases and acks until it is told to stop."""

    def __init__(self, url: str, min_groups: int, max_groups: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.acked = 0
        self._url, self._sizes, self._over = url, (min_groups, max_groups), stop

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._over.is_set():
                self.acked += train(http, *self._sizes)


def main(url: str, pid: int, times: Times, min_groups: int, in_flight: int) -> None:
    stop = threading.Event()
    ranks = [Rank(url, min_groups, max(MAX_GROUPS, in_flight // GROUP), stop) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()

    def acked() -> int:
        if not all(rank.is_alive() for rank in ranks):
            raise RuntimeError("a rank of the trainer has failed; its traceback is above")
        return sum(rank.acked for rank in ranks)

    begun = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as http:
        while (now := time.monotonic()) < begun + times.warm_up_s or (
            acked() < in_flight and now < begun + MOST_WARM_UP * times.warm_up_s
        ):
            time.sleep(0.05)
        first = mark(http, pid, acked())
        time.sleep(times.window_s)
        last = mark(http, pid, acked())
    stop.set()
    print(difference(first, last).line())


def mark(http: httpx.Client, pid: int, acked: int) -> Mark:
    page = http.get("/metrics").raise_for_status().text
    finished = _FINISHED.search(page)
    if finished is None:
        raise RuntimeError("the service's /metrics has no rollout_finished_total")
    return Mark(
        acked=acked,
        finished=int(float(finished[1])),
        cpu_s=cpu_seconds(pid),
        helpers_s=helpers_cpu_seconds(pid),
        lags=lag_buckets(page),
        at=time.monotonic(),
    )


def difference(first: Mark, last: Mark) -> Run:
    count = max(0, min(last.acked - first.acked, last.finished - first.finished))
    return Run(
        per_s=count / (last.at - first.at),
        cpu_ms=1000 * (last.cpu_s - first.cpu_s) / max(1, count),
        helpers_cpu_ms=1000 * (last.helpers_s - first.helpers_s) / max(1, count),
        finished_per_s=(last.finished - first.finished) / (last.at - first.at),
        lag_p99_ms=1000 * quantile(first.lags, last.lags, 0.99),
    )


if __name__ == "__main__":
    given = Times(float(sys.argv[3]), float(sys.argv[4]))
    main(sys.argv[1], int(sys.argv[2]), given, int(sys.argv[5]), int(sys.argv[6]))
