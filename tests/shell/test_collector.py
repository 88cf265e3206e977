"""The garbage collector: full collections come after many aborts, and not whenever Python finds it time."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from rollout_service import collector
from rollout_service.collector import ABORTS, Collector
from tests.engine_fleets import until


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def old_garbage() -> weakref.ref[Cycle]:
    """A cycle nobody refers to, in the oldest generation."""
    cycle = Cycle()
    gc.collect()  # it is alive: it becomes old
    gone = weakref.ref(cycle)
    del cycle
    return gone


async def test_a_full_collection_comes_with_time(
    old_garbage: weakref.ref[Cycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "FULL_S", 0.05)
    running = asyncio.ensure_future(Collector().run())
    await until(lambda: old_garbage() is None)
    running.cancel()


async def test_a_full_collection_comes_after_many_aborts_and_not_after_few(
    old_garbage: weakref.ref[Cycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "SETTLE_S", 0.0)
    tested = Collector()
    running = asyncio.ensure_future(tested.run())
    tested.rollouts_aborted(ABORTS - 1)
    for _ in range(10):  # passes of the loop, which is all it would need
        await asyncio.sleep(0)
    assert old_garbage() is not None
    tested.rollouts_aborted(1)
    await until(lambda: old_garbage() is None)
    running.cancel()


def test_a_tamed_collector_never_looks_at_the_oldest_generation_by_itself() -> None:
    """In a process of its own: it is a setting of the whole process."""
    code = """
import gc
from rollout_service import collector
collector.tame()
before = gc.get_stats()
kept = [[n] for n in range(300_000)]
after = gc.get_stats()
young, old = (after[i]["collections"] - before[i]["collections"] for i in (0, 2))
assert young >= 40, young
assert old == 0, old
assert gc.get_freeze_count() > 1000
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "ok", done.stderr
