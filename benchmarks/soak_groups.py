"""A million groups through one process: memory and the time of a lease must not grow.

What always holds: the orchestrator, its rules, its observers and the SQLite store are the service's own; only rollouts
and rewards are instant, so that what is left is what the service itself keeps. It ends with 0 if and only if every
group submitted was acked exactly once and neither figure grew beyond its bound.

    python -m benchmarks.soak_groups [--groups 1000000] [--every 50000]

Prints a line every so many groups. The median of the last quarter's lines is held against that of the second quarter's:
the first is left out, for caches and allocators fill then.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import resident_bytes
from rollout_service import logs
from rollout_service.core.model import FinishedRollout, FinishReason, Prompt, RolloutJob, ScoreJob, Scores, Turn
from rollout_service.metrics import Metrics
from rollout_service.observers import History, Observers, OutcomeLog
from rollout_service.orchestrator import LeaseRequest, LeaseStatus, Orchestrator, Submission
from rollout_service.orchestrator.parts import Gate
from rollout_service.run import rules
from rollout_service.settings import Settings
from rollout_service.store import open_store
from rollout_service.store.sqlite_file import CACHE_KIB

ROOT = Path(__file__).resolve().parents[1]
STORE = "soak.db"
GROUP, TOKENS = 2, 32
SUBMIT, KEEP_PENDING = 250, 2_000
LEASE, LEASES_A_STEP = 64, 4
"""Groups of a lease, and leases between two policy versions."""
MEMORY_BOUND_BYTES, MEMORY_BOUND_SHARE = 8 * 2**20, 0.05
"""What the allocator's mood may add. A million groups would show a leak of some 30 bytes a group."""
PAGE_CACHE_BYTES = 1024 * CACHE_KIB
"""The store's page cache fills with the file until it is full, which is no leak: a long run judges a full one."""
LATENCY_BOUND = 1.5
"""Ratio. Other work of the machine moves medians by a third; what scans all that ever was grows by 2.3."""
LEAST_GROUPS = 20 * LEASE
"""A lease or more in each of twenty lines."""
STUCK_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One interval. `lease_ms` and `ack_ms`: medians; `lease_p99_ms`: the 99th percentile."""

    groups: int
    """Acked since the start."""
    per_s: float
    resident: int
    """Bytes, at the end of the interval."""
    objects: int
    """Python's, after a collection."""
    lease_ms: float
    lease_p99_ms: float
    ack_ms: float
    stored: int
    """Bytes of the store's file, without its log."""

    def __str__(self) -> str:
        return (
            f"{self.groups:>9,} groups {self.per_s:>7.0f}/s   resident {self.resident / 2**20:>6.1f} MiB   "
            f"objects {self.objects:>8,}   lease {self.lease_ms:>6.2f} ms (p99 {self.lease_p99_ms:>6.2f})   "
            f"ack {self.ack_ms:>6.2f} ms   file {self.stored / 2**20:>7.1f} MiB"
        )


def _answer() -> tuple[Turn, ...]:
    ids = array("i", range(100, 100 + TOKENS))
    turn = Turn(
        prompt_ids=array("i", range(65, 81)),
        output_ids=ids,
        logprobs=array("f", [-0.5] * TOKENS),
        finish_reason=FinishReason.STOP,
        text="x" * TOKENS,
        engine="http://127.0.0.1:1",
    )
    return (turn,)


@dataclass
class InstantRunner:
    """Every rollout is finished in the next pass of the loop."""

    turns: tuple[Turn, ...] = field(default_factory=_answer)

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout:
        await gate.passed()
        await asyncio.sleep(0)
        return FinishedRollout(index=job.index, prompt="p", completion="c", turns=self.turns)


class InstantScorer:
    async def score(self, job: ScoreJob) -> Scores:
        return Scores(rewards={"instant": [float(rollout.index) for rollout in job.rollouts]})


class Plenty:
    """Engines that are never what is missing."""

    async def abort(self, rollouts: Collection[str]) -> None:
        pass

    def healthy_capacity(self) -> int:
        return 10**6

    def unhealthy(self) -> dict[str, str]:
        return {}


class Run:
    """`groups` groups through one orchestrator; `tell` gets each line."""

    def __init__(self, folder: Path, groups: int, every: int, tell: Callable[[Line], None]) -> None:
        self._folder, self._groups, self._every, self._tell = folder, groups, every, tell
        settings = Settings.model_validate(
            {
                "engines": [{"url": "http://127.0.0.1:1"}],
                "groups": {"num_generations": GROUP, "max_ready_groups": 512, "max_pending_groups": 10_000},
                "dispatch": {"max_inflight_rollouts": 256},
                "rewards": [{"name": "instant", "function": "no_module:none"}],
                "store": {"url": f"sqlite:///{folder}/{STORE}"},
            }
        )
        metrics = Metrics(rewards=["instant"], teachers=[], samples_alone=False)
        self._door = Orchestrator(
            rules(settings),
            store=open_store(settings.store.url, max_staleness=settings.groups.max_staleness),
            runner=InstantRunner(),
            scorer=InstantScorer(),
            engines=Plenty(),
            observer=Observers(metrics, History(time.time), OutcomeLog()),
        )
        self.lines: list[Line] = []
        self._lease_s: list[float] = []
        self._ack_s: list[float] = []
        self._acked = 0
        self._stepped = time.monotonic()

    async def go(self) -> None:
        await self._door.start()
        feeder = asyncio.create_task(self._feed())
        try:
            await self._train()
            await feeder
        finally:
            feeder.cancel()
            await self._door.stop()
        counts = self._door.status().counts
        acked = counts.groups["acked"]  # type: ignore[index]  # a GroupState is its own text
        if (counts.submitted, acked, self._acked) != (self._groups, self._groups, self._groups):
            raise RuntimeError(f"{self._groups} groups were submitted and {self._acked} acked, but {counts}")

    async def _feed(self) -> None:
        sent = 0
        while sent < self._groups:
            if self._door.status().counts.groups["pending"] >= KEEP_PENDING:  # type: ignore[index]  # as above
                await asyncio.sleep(0.005)
                continue
            until = min(sent + SUBMIT, self._groups)
            rows = [
                Prompt(prompt_id=f"p{number}", text=f"prompt {number}", num_generations=GROUP)
                for number in range(sent, until)
            ]
            submissions = [Submission(prompt=row, digest=row.prompt_id.encode()) for row in rows]
            await self._door.submit(submissions, final=until == self._groups)
            sent = until

    async def _train(self) -> None:
        version = leases = 0
        request = LeaseRequest(max_groups=LEASE, min_groups=1, wait_s=STUCK_S)
        self._stepped = time.monotonic()
        while True:
            begun = time.perf_counter()
            answer = await self._door.lease(request)
            leased = time.perf_counter()
            if answer.status is LeaseStatus.EXHAUSTED:
                return
            if answer.lease is None:
                raise RuntimeError(f"no group was ready in {STUCK_S} s: {self._door.status()}")
            await self._door.ack(answer.lease.lease_id, None)
            self._lease_s.append(leased - begun)
            self._ack_s.append(time.perf_counter() - leased)
            self._acked += len(answer.payloads)
            leases += 1
            if leases % LEASES_A_STEP == 0:
                version += 1
                await self._door.post_version(version)
            if self._acked >= self._every * (len(self.lines) + 1):
                self._say()

    def _say(self) -> None:
        now = time.monotonic()
        before = self.lines[-1].groups if self.lines else 0
        gc.collect()
        line = Line(
            groups=self._acked,
            per_s=(self._acked - before) / (now - self._stepped),
            resident=resident_bytes(os.getpid()),
            objects=len(gc.get_objects()),
            lease_ms=1000 * statistics.median(self._lease_s),
            lease_p99_ms=1000 * sorted(self._lease_s)[int(0.99 * len(self._lease_s))],
            ack_ms=1000 * statistics.median(self._ack_s),
            stored=(self._folder / STORE).stat().st_size,
        )
        self._lease_s, self._ack_s, self._stepped = [], [], time.monotonic()
        self.lines.append(line)
        self._tell(line)


def grown(lines: Sequence[Line]) -> list[str]:
    """What the last quarter has more of than the second, beyond the bounds; empty: all is flat."""
    quarter = len(lines) // 4
    if not quarter:
        raise ValueError(f"{len(lines)} lines have no quarters; take more groups, or lines closer together")
    second, last = lines[quarter : 2 * quarter], lines[-quarter:]

    def medians(value: Callable[[Line], float]) -> tuple[float, float]:
        return statistics.median(map(value, second)), statistics.median(map(value, last))

    found = []
    cached = medians(lambda line: min(line.stored, PAGE_CACHE_BYTES))
    before, after = medians(lambda line: line.resident)
    if after > before * (1 + MEMORY_BOUND_SHARE) + MEMORY_BOUND_BYTES + cached[1] - cached[0]:
        found.append(f"resident memory grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB")
    for what, value in (("a lease", lambda line: line.lease_ms), ("an ack", lambda line: line.ack_ms)):
        before, after = medians(value)
        if after > before * LATENCY_BOUND:
            found.append(f"the median of {what} grew from {before:.2f} to {after:.2f} ms")
    return found


def soak(groups: int, every: int, tell: Callable[[Line], None], *, parent: Path = ROOT) -> list[Line]:
    """Run it in a folder of its own below `parent`. Raises RuntimeError where a group was lost or stuck."""
    # below the checkout by default: a real disk, where the temporary folder may be memory
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=parent))
    try:
        run = Run(folder, groups, every, tell)
        asyncio.run(run.go())
        return run.lines
    finally:
        shutil.rmtree(folder)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--groups", type=int, default=1_000_000)
    arguments.add_argument("--every", type=int, default=0, help="groups between two lines (a twentieth)")
    given = arguments.parse_args()
    if given.groups < LEAST_GROUPS:
        arguments.error(f"--groups {given.groups}: at least {LEAST_GROUPS:,}, fewer say nothing")
    logs.configure(level="error")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    every = given.every or max(1, given.groups // 20)
    lines = soak(given.groups, every, lambda line: print(line, flush=True))
    found = grown(lines)
    print("\n".join(found) or "flat: neither memory nor the time of a lease or an ack grew beyond its bound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
