"""The limit of an engine that sets itself: what moves it, and where it comes to rest."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.limits import FIRST, FLOOR, KV_FULL, KV_ROOM, STEP, AdaptiveLimit
from rollout_service.engines.loads import LoadReport

IDLE = LoadReport(running=0, waiting=0)
QUEUED = LoadReport(running=64, waiting=64)
KV_PRESSED = LoadReport(running=64, waiting=0, kv_usage=0.99)
BETWEEN = LoadReport(running=64, waiting=0, kv_usage=(KV_ROOM + KV_FULL) / 2)
reports = st.builds(
    LoadReport,
    running=st.integers(0, 5000),
    waiting=st.integers(0, 5000),
    kv_usage=st.floats(0, 1),
    preemptions=st.integers(0, 100),
)


def test_a_limit_that_is_used_grows_by_a_group_while_there_is_room() -> None:
    limit = AdaptiveLimit(1024)
    first = limit.value
    assert first == FIRST
    assert limit.observe(IDLE, first) == first + 8
    for _ in range(20):
        before = limit.value
        assert before < limit.observe(IDLE, before) <= before + STEP


@pytest.mark.parametrize("in_flight", [0, 1, FIRST // 2])
def test_a_limit_nobody_uses_does_not_grow(in_flight: int) -> None:
    assert AdaptiveLimit(1024).observe(IDLE, in_flight) == FIRST


@pytest.mark.parametrize("report", [BETWEEN, LoadReport(running=64, waiting=1)])
def test_between_room_and_too_much_it_stays(report: LoadReport) -> None:
    limit = AdaptiveLimit(1024)
    assert {limit.observe(report, FIRST) for _ in range(10)} == {FIRST}


@pytest.mark.parametrize("report", [QUEUED, KV_PRESSED])
def test_a_queue_or_a_full_cache_lowers_it_once_until_what_is_in_flight_has_come_down(report: LoadReport) -> None:
    limit = AdaptiveLimit(1024)
    lowered = limit.observe(report, FIRST)
    assert lowered == FIRST * 3 // 4
    for in_flight in range(FIRST, lowered, -1):
        assert limit.observe(report, in_flight) == lowered
    assert limit.observe(report, lowered) < lowered


def test_what_is_preempted_while_too_much_comes_down_is_answered_for_already() -> None:
    limit = AdaptiveLimit(1024)
    limit.observe(LoadReport(running=64, waiting=0, preemptions=1), 1)
    lowered = limit.observe(LoadReport(running=64, waiting=0, kv_usage=0.9, preemptions=2), FIRST)
    assert lowered < FIRST
    assert limit.observe(LoadReport(running=lowered, waiting=0, kv_usage=0.9, preemptions=3), lowered) == lowered
    assert limit.observe(LoadReport(running=lowered, waiting=0, kv_usage=0.9, preemptions=4), lowered) < lowered


def test_it_does_not_grow_while_more_than_it_allows_is_in_flight() -> None:
    limit = AdaptiveLimit(1024)
    lowered = limit.observe(QUEUED, FIRST)
    assert limit.observe(IDLE, FIRST) == lowered


def test_new_preemptions_lower_it_and_old_ones_do_not() -> None:
    limit = AdaptiveLimit(1024)
    seen = LoadReport(running=64, waiting=0, preemptions=900)
    assert limit.observe(seen, FIRST) > FIRST
    value = limit.value
    assert limit.observe(LoadReport(running=64, waiting=0, preemptions=901), value) < value
    value = limit.value
    assert limit.observe(LoadReport(running=64, waiting=0, preemptions=901), value) > value


def test_an_engine_that_was_restarted_has_preempted_nothing_new() -> None:
    limit = AdaptiveLimit(1024)
    limit.observe(LoadReport(running=64, waiting=0, preemptions=900), 1)
    assert limit.observe(LoadReport(running=64, waiting=0, preemptions=3), FIRST) > FIRST


def test_a_queue_of_others_alone_moves_nothing() -> None:
    assert AdaptiveLimit(1024).observe(QUEUED, 0) == FIRST


def test_a_storm_of_refusals_lowers_it_once_a_look() -> None:
    limit = AdaptiveLimit(1024)
    assert {limit.refused(FIRST) for _ in range(100)} == {FIRST * 3 // 4}
    limit.observe(BETWEEN, 10)
    assert limit.refused(0) < FIRST * 3 // 4


def test_a_ceiling_that_lets_nothing_through_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="lets nothing through"):
        AdaptiveLimit(0)


@given(st.integers(1, 4096), st.lists(st.one_of(st.none(), st.tuples(reports, st.integers(0, 5000)))))
def test_it_stays_between_floor_and_ceiling_and_moves_at_most_a_step_up(ceiling: int, looks: list[object]) -> None:
    limit = AdaptiveLimit(ceiling)
    for look in looks:
        before = limit.value
        after = limit.refused(limit.value + 1) if look is None else limit.observe(*look)  # type: ignore[misc]  # a pair
        assert after == limit.value
        assert min(FLOOR, ceiling) <= after <= min(ceiling, before + STEP)
        assert after >= int(before * 0.75) or after == FLOOR


@given(reports, reports, st.integers(0, 5000))
def test_a_worse_report_never_leaves_a_greater_limit(a: LoadReport, b: LoadReport, in_flight: int) -> None:
    worse = LoadReport(
        running=max(a.running, b.running),
        waiting=max(a.waiting, b.waiting),
        kv_usage=max(a.kv_usage, b.kv_usage),
        preemptions=max(a.preemptions, b.preemptions),
    )
    one, other = AdaptiveLimit(1024), AdaptiveLimit(1024)
    for limit in (one, other):
        limit.observe(IDLE, 0)
    assert one.observe(a, in_flight) >= other.observe(worse, in_flight)


class SmallEngine:
    """Runs `seqs` sequences at once, each of which grows by a token a step, in a cache of `kv_tokens`."""

    def __init__(self, seqs: int, kv_tokens: int, seed: int = 7) -> None:
        self.seqs = seqs
        self.kv_tokens = kv_tokens
        self.running: list[list[int]] = []
        """Tokens held, tokens at the end."""
        self.waiting = 0
        self.preemptions = 0
        self._random = random.Random(seed)

    @property
    def in_flight(self) -> int:
        return len(self.running) + self.waiting

    def step(self, limit: int) -> None:
        """Enough callers for any limit; what is over goes, what fits comes, what does not fit is thrown out."""
        self.running = [[held + 20, end] for held, end in self.running if held < end]
        while sum(held for held, _ in self.running) > self.kv_tokens:
            self.running.pop()
            self.waiting += 1
            self.preemptions += 1
        self.waiting += max(0, limit - self.in_flight)
        while self.waiting and len(self.running) < self.seqs and self.usage < 1:
            self.running.append([100, self._random.randint(200, 900)])
            self.waiting -= 1

    @property
    def usage(self) -> float:
        return min(1.0, sum(held for held, _ in self.running) / self.kv_tokens)

    def report(self) -> LoadReport:
        return LoadReport(
            running=len(self.running), waiting=self.waiting, kv_usage=self.usage, preemptions=self.preemptions
        )


def run(engine: SmallEngine, limit: AdaptiveLimit, looks: int) -> list[int]:
    """The limit at each look; four steps of the engine lie between two."""
    values = []
    for _ in range(looks):
        for _ in range(4):
            engine.step(limit.value)
        values.append(limit.observe(engine.report(), engine.in_flight))
    return values


def test_it_comes_to_rest_where_the_batch_is_full() -> None:
    engine, limit = SmallEngine(seqs=256, kv_tokens=10**9), AdaptiveLimit(4096)
    values = run(engine, limit, 100)
    assert next(look for look, value in enumerate(values) if value >= 256) < 20
    assert 256 <= min(values[20:]) <= max(values[20:]) <= 256 + STEP
    assert len(set(values[30:])) == 1


def test_it_comes_to_rest_where_the_cache_is_full() -> None:
    # 325 tokens a sequence on average: the cache holds about 150 of them, far below the batch.
    engine, limit = SmallEngine(seqs=256, kv_tokens=50_000), AdaptiveLimit(4096)
    values = run(engine, limit, 400)[100:]
    assert min(values) > 65
    assert max(values) < 170
    usages = []
    preempted = engine.preemptions
    for _ in range(200):
        run(engine, limit, 1)
        usages.append(engine.usage)
    assert sum(usages) / len(usages) > 0.75
    assert engine.preemptions - preempted < 200, "of about 4,000 sequences"


def test_it_recovers_when_an_engine_has_room_again() -> None:
    engine, limit = SmallEngine(seqs=16, kv_tokens=10**9), AdaptiveLimit(4096)
    assert max(run(engine, limit, 60)[-20:]) <= 18
    engine.seqs = 512
    assert 512 <= run(engine, limit, 80)[-1] <= 512 + STEP


def test_a_longer_workload_brings_it_down_within_a_few_looks() -> None:
    engine, limit = SmallEngine(seqs=512, kv_tokens=10**9), AdaptiveLimit(4096)
    assert run(engine, limit, 100)[-1] >= 512
    engine.kv_tokens = 50_000
    values = run(engine, limit, 60)
    assert min(values) >= 50, "it must not fall to the floor for one bad time"
    assert max(values[20:]) < 250
