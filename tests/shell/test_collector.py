"""The garbage collector: it runs when there is something to collect, and not whenever Python finds it time."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from rollout_service import collector
from rollout_service.collector import ABORTS, FULL_S, GROWTH, Collector
from tests.engine_fleets import until


class Cycle:
    def __init__(self) -> None:
        self.me = self


def garbage() -> weakref.ref[Cycle]:
    """A cycle nobody refers to, in the oldest generation."""
    cycle = Cycle()
    gc.collect()  # it is alive: it becomes old
    gone = weakref.ref(cycle)
    del cycle
    return gone


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_collection_comes_with_time() -> None:
    clock, old = Clock(), garbage()
    tested = Collector(clock)
    clock.now += FULL_S - 1
    assert not tested.look()
    assert old() is not None
    clock.now += 1
    assert tested.look()
    assert old() is None
    assert not tested.look()


def test_a_collection_comes_after_many_aborts_and_not_after_few() -> None:
    old, tested = garbage(), Collector(Clock())
    tested.rollouts_aborted(ABORTS - 1)
    assert not tested.look()
    tested.rollouts_aborted(1)
    assert tested.look()
    assert old() is None
    assert not tested.look(), "those are dealt with"


def test_a_collection_comes_when_much_more_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = Collector(Clock())
    monkeypatch.setattr(gc, "get_count", lambda: (GROWTH - 1, 0, 0))
    assert not tested.look()
    monkeypatch.setattr(gc, "get_count", lambda: (GROWTH, 0, 0))
    assert tested.look()


async def test_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK_S", 0.01)
    old, tested = garbage(), Collector()
    running = asyncio.ensure_future(tested.run())
    tested.rollouts_aborted(ABORTS)
    await until(lambda: old() is None)
    running.cancel()


def test_python_collects_nothing_by_itself_once_tamed_and_still_counts() -> None:
    """In a process of its own: it is a setting of the whole process."""
    code = """
import gc
from rollout_service import collector
collector.tame()
before = gc.get_stats()
kept = [[n] for n in range(collector.GROWTH)]
assert gc.get_stats() == before
assert gc.get_count()[0] >= collector.GROWTH, gc.get_count()
assert gc.get_freeze_count() > 1000
assert collector.Collector().look()
assert not collector.Collector().look()
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "ok", done.stderr
