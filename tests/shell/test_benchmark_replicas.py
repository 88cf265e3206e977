"""The benchmark of replicas: what it counts, and what it makes of it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.load import GROUP
from benchmarks.replicas import Mark, difference
from benchmarks.replicas_figures import Bumps, bumps_figures, name_of
from benchmarks.replicas_world import Counted, family, server_cpu_seconds

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}]); print(); sys.stdin.read()"


def mark(at: float, *, acked: int, finished: int, spent: float = 0.0, commits: int = 0, busy_ms: float = 0.0) -> Mark:
    counted = Counted(commits=commits, wal_bytes=100 * commits, busy_ms=busy_ms, moves=2 * commits)
    return Mark(
        at=at, acked=acked, finished=finished, service_s=spent, helpers_s=0.0, server_s=2 * spent, counted=counted
    )


def test_a_load_counts_groups_that_were_both_finished_and_acked_and_what_each_of_them_cost():
    first = mark(10.0, acked=80, finished=800)
    last = mark(12.0, acked=80 + 20 * GROUP, finished=800 + 10 * GROUP, spent=0.1, commits=50, busy_ms=100.0)
    found = difference(first, last)
    assert (found.groups_per_s, found.service_cpu_ms, found.server_cpu_ms) == pytest.approx((5.0, 10.0, 20.0))
    assert (found.commits, found.wal_bytes, found.transaction_ms, found.held_ms) == pytest.approx((5, 500, 2, 20))


def test_a_window_without_a_group_is_no_figure():
    with pytest.raises(RuntimeError, match="no group"):
        difference(mark(0.0, acked=0, finished=0), mark(1.0, acked=GROUP, finished=0))


def test_the_servers_cpu_has_that_of_children_that_ended():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child has ended
        assert family(parent.pid) == [parent.pid]
        assert 0.25 <= server_cpu_seconds(parent.pid) < time.monotonic()
        parent.communicate("")


def test_the_version_of_the_slowest_replica_is_what_is_held_against_the_goal():
    runs = [Bumps(aborted_ms=(10.0, 20.0), answered_ms=(30.0,)), Bumps(aborted_ms=(260.0,), answered_ms=(40.0,))]
    (figure,) = bumps_figures({"pushed": runs})
    assert (figure.value, figure.reached, figure.runs) == (260.0, False, (20.0, 260.0))
    assert "median 20.00 ms of 3" in figure.beside


def test_ways_have_names_people_understand():
    assert [name_of(count) for count in (0, 1, 2)] == ["SQLite", "1 replica", "2 replicas"]
