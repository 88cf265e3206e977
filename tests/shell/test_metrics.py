"""The metrics page: what is there from the first scrape, what counts, what stays bounded."""

from __future__ import annotations

import asyncio
import re
from array import array
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_service.core.changes import Counts, Halt, Moved
from rollout_service.core.group import Group
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import (
    DropReason,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    GroupState,
    Turn,
)
from rollout_service.metrics import Metrics
from rollout_service.orchestrator import StatusView

S = GroupState
GROUP = Group(seq=1, prompt_id="a", epoch=0, num_generations=2, waiting=(0, 1), submitted_at=100.0, changed_at=100.0)
MISSION = ("rollout_failed_total", "rollout_dropped_groups_total", "rollout_stale_groups_total")


class Fleet:
    def describe(self) -> list[dict[str, Any]]:
        return [{"id": "e0", "healthy": True, "in_flight": 7, "max_inflight": 64, "url": "http://user:key@engine"}]


def view(**changed: Any) -> StatusView:
    known = StatusView(
        policy_version=3,
        max_staleness=4,
        counts=Counts(submitted=2, groups=dict.fromkeys(S, 0) | {S.PENDING: 1, S.ACKED: 1}),
        slots_total=10,
        slots_used=4,
        paused=False,
        halt=None,
        final=False,
        blocked=None,
        oldest=GROUP,
        store_ok=True,
        store_error=None,
        leases=0,
        waiting_lease_calls=0,
        read_position=0,
        now=105.0,
    )
    return replace(known, **changed)


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(rewards=["accuracy"])
    made.watch(view, Fleet())
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def moved(kind: EventKind, before: S, after: S, **changed: Any) -> Moved:
    old = replace(GROUP, state=before, changed_at=100.0)
    return Moved(before=old, after=replace(old, state=after, changed_at=102.0, **changed), kind=kind)


def finished(tokens: int) -> FinishedRollout:
    turn = Turn(
        prompt_ids=array("i", (1,)),
        output_ids=array("i", range(tokens)),
        logprobs=array("f", (-1.0,) * tokens),
        finish_reason=FinishReason.STOP,
        text="x",
        engine="http://engine",
    )
    return FinishedRollout(index=0, prompt="p", completion="x", turns=(turn,))


def test_every_counter_is_at_zero_with_every_known_reason_before_anything_happens(metrics: Metrics):
    for reason in FailureReason:
        assert value(metrics, "rollout_failed_total", reason=reason) == 0
        assert value(metrics, "rollout_retries_total", reason=reason) == 0
    for reason in DropReason:
        assert value(metrics, "rollout_dropped_groups_total", reason=reason) == 0
    assert value(metrics, "rollout_stale_groups_total") == 0
    assert value(metrics, "rollout_reward_errors_total", reward="accuracy") == 0
    page = metrics.page()[0].decode()
    counters = re.findall(r"^# TYPE (\S+) counter$", page, re.MULTILINE)
    unlabelled = {"rollout_http_requests_total"}  # its labels are what was asked
    for name in set(counters) - unlabelled:
        assert re.search(rf"^{name}(\{{.*\}})? ", page, re.MULTILINE), name
    assert set(MISSION) <= set(counters)


def test_names_follow_the_rules_of_prometheus(metrics: Metrics):
    for family in text_string_to_metric_families(metrics.page()[0].decode()):
        assert family.name.startswith("rollout_")
        assert family.documentation
        assert not family.name.endswith(("_total", "_count", "_sum"))
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert "_created" not in sample.name
            assert not set(sample.labels) & {"group_id", "prompt_id", "lease_id", "path", "url"}
            assert "key@" not in str(sample.labels)


def test_gauges_are_read_from_the_run_at_the_scrape(metrics: Metrics):
    assert value(metrics, "rollout_inflight_rollouts") == 4
    assert value(metrics, "rollout_slots", state="used") == 4
    assert value(metrics, "rollout_slots", state="free") == 6
    assert value(metrics, "rollout_policy_version") == 3
    assert value(metrics, "rollout_submitted_groups_total") == 2
    assert {state: value(metrics, "rollout_groups", state=state) for state in S} == view().counts.groups
    assert value(metrics, "rollout_oldest_outstanding_age_seconds") == 5.0
    assert value(metrics, "rollout_engine_up", engine="e0") == 1
    assert value(metrics, "rollout_engine_load", engine="e0") == 7
    halted = Metrics()
    halt = Halt(reason="r", group_id="g-1", engine=None, error="e", since=1.0)
    halted.watch(lambda: view(halt=halt, paused=True, store_ok=False, oldest=None), Fleet())
    flags = [value(halted, f"rollout_{name}") for name in ("halted", "paused", "store_up")]
    assert flags == [1, 1, 0]


def test_one_gauge_alone_tells_the_rollouts_in_flight(metrics: Metrics):
    page = metrics.page()[0].decode()
    names = {line.partition(" ")[0] for line in page.splitlines() if re.search("in_?flight", line) and line[0] != "#"}
    assert names == {"rollout_inflight_rollouts"}


@pytest.mark.parametrize("after", [S.STALE, S.PENDING])
def test_a_group_that_lost_work_to_a_version_counts_as_stale_whether_it_goes_on_or_not(metrics: Metrics, after: S):
    metrics.group_moved(moved(EventKind.OUTDATED, S.GENERATING, after))
    assert value(metrics, "rollout_stale_groups_total") == 1


def test_moves_are_counted_by_how_they_end(metrics: Metrics):
    metrics.group_moved(moved(EventKind.DISPATCHED, S.PENDING, S.GENERATING))
    metrics.group_moved(moved(EventKind.SCORED, S.SCORING, S.READY))
    metrics.group_moved(moved(EventKind.LEASED, S.READY, S.LEASED))
    metrics.group_moved(moved(EventKind.ACKED, S.LEASED, S.ACKED))
    metrics.group_moved(moved(EventKind.SCORED, S.SCORING, S.DROPPED, reason=DropReason.UNSCORABLE))
    metrics.group_moved(moved(EventKind.ROLLOUT_FAILED, S.GENERATING, S.FAILED))
    assert value(metrics, "rollout_acked_groups_total") == 1
    assert value(metrics, "rollout_dropped_groups_total", reason="unscorable") == 1
    assert value(metrics, "rollout_failed_groups_total") == 1
    assert value(metrics, "rollout_stale_groups_total") == 0
    assert value(metrics, "rollout_scoring_seconds_count") == 2
    assert value(metrics, "rollout_queue_seconds_sum", queue="pending") == 2.0
    assert value(metrics, "rollout_queue_seconds_sum", queue="ready") == 2.0


def test_every_generated_token_is_counted_once_and_wasted_ones_by_reason(metrics: Metrics):
    metrics.rollout_settled(finished(10), 1.0, group_id="g-1")
    failure = FailedRollout(index=1, reason=FailureReason.BAD_ANSWER, error="x", wasted_tokens=5)
    metrics.rollout_settled(failure, 1.0, group_id="g-1")
    metrics.tokens_wasted(10, "stale")
    metrics.tokens_wasted(3, "late")
    assert value(metrics, "rollout_generated_tokens_total") == 18
    assert value(metrics, "rollout_failed_total", reason="bad_answer") == 1
    assert value(metrics, "rollout_wasted_tokens_total", reason="stale") == 10
    assert value(metrics, "rollout_wasted_tokens_total", reason="late") == 3
    assert value(metrics, "rollout_wasted_tokens_total", reason="failed") == 5
    metrics.tokens_wasted(1, "a reason nobody knows")
    assert value(metrics, "rollout_wasted_tokens_total", reason="other") == 1


def test_the_newest_versions_mean_reward_is_there_once_a_group_of_it_was_delivered(metrics: Metrics):
    def deliver(version: int, reward: float | None) -> float | None:
        group = replace(GROUP, version=version)
        metrics.group_delivered(group, staleness=0, tokens=1, reward_mean=reward)
        return value(metrics, "rollout_newest_reward_mean")

    assert value(metrics, "rollout_newest_reward_mean") is None
    assert deliver(3, None) is None
    assert deliver(3, -0.5) == -0.5
    assert deliver(3, 1.0) == 0.25
    assert deliver(2, 9.0) == 0.25
    assert deliver(5, 0.75) == 0.75


def test_why_no_group_is_opened_is_one_of_the_known_reasons():
    metrics = Metrics()
    metrics.watch(lambda: view(blocked="pace"), Fleet())
    reasons = {
        name: value(metrics, "rollout_blocked", reason=name)
        for name in ("paused", "halted", "wait_for_version", "max_ready_groups", "max_ready_bytes", "pace")
    }
    assert reasons == dict.fromkeys(reasons, 0.0) | {"pace": 1.0}
    assert value(metrics, "rollout_max_staleness") == 4


def test_deliveries_fill_the_histograms(metrics: Metrics):
    metrics.group_delivered(GROUP, staleness=2, tokens=100, reward_mean=0.55)
    metrics.group_delivered(GROUP, staleness=0, tokens=50, reward_mean=None)
    assert value(metrics, "rollout_delivered_groups_total") == 2
    assert value(metrics, "rollout_delivered_tokens_total") == 150
    assert value(metrics, "rollout_group_staleness_bucket", le="0.0") == 1
    assert value(metrics, "rollout_group_staleness_bucket", le="2.0") == 2
    assert value(metrics, "rollout_reward_mean_count") == 1


def test_the_page_comes_as_openmetrics_to_whoever_asks_for_it(metrics: Metrics):
    page, kind = metrics.page("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert page.decode().endswith("# EOF\n")
    assert metrics.page("*/*")[1].startswith("text/plain")


async def test_a_stalled_loop_shows_as_lag(metrics: Metrics):
    measuring = asyncio.create_task(metrics.measure_lag())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, _stall)
    async with asyncio.timeout(10):
        while (value(metrics, "rollout_event_loop_lag_seconds_sum") or 0) < 0.05:
            await asyncio.sleep(0.01)
    measuring.cancel()


def _stall() -> None:
    import time

    time.sleep(0.1)
