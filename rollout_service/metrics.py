"""Every metric of the service, on a registry of its own.

What always holds: counters exist at 0, with every known reason, from the first scrape; gauges are read from the run
itself when somebody scrapes, so that they cannot drift; labels are bounded (never an id or a path). Counters speak of
this process and start at 0 with it, except `rollout_submitted_groups_total`, which the store keeps.

| name | meaning |
| --- | --- |
| rollout_failed_total{reason} | rollouts that failed after all their attempts |
| rollout_dropped_groups_total{reason} | groups dropped |
| rollout_stale_groups_total | groups that lost work to a new version, once per attempt |
| rollout_stale_samples_total | in distillation, where each sample stands alone: samples lost so; else 0 |
| rollout_failed_groups_total | groups all of whose rollouts failed |
| rollout_submitted_groups_total | groups submitted, over all restarts |
| rollout_delivered_groups_total, rollout_delivered_tokens_total | groups, and their generated tokens, in new leases |
| rollout_acked_groups_total | groups acked |
| rollout_finished_total | rollouts that survived |
| rollout_generated_tokens_total | tokens engines generated, as far as they answered |
| rollout_wasted_tokens_total{reason} | of those, tokens that will not be delivered |
| rollout_aborts_total | rollouts in flight that were stopped |
| rollout_engine_aborts_total | engine requests told to abort |
| rollout_engine_abort_errors_total | engine requests whose abort call failed |
| rollout_retries_total{reason} | engine requests sent again |
| rollout_reward_errors_total{reward} | groups a reward failed on |
| rollout_teacher_errors_total{teacher} | rollouts a teacher failed on |
| rollout_halts_total | times dispatch halted |
| rollout_store_errors_total | commits that failed |
| rollout_http_requests_total{route,status} | requests answered, by method and route template, and class of status |
| rollout_groups{state}, rollout_policy_version, rollout_slots{state} | the run now |
| rollout_inflight_rollouts | rollouts at engines now (= used slots) |
| rollout_max_staleness | the bound, as configured |
| rollout_blocked{reason} | 1 for the reason why no new group is opened now, 0 for the others |
| rollout_newest_reward_mean | mean reward of the newest version delivered; absent before there is one |
| rollout_leases, rollout_waiting_lease_calls | live leases; callers waiting for one |
| rollout_paused, rollout_halted, rollout_store_up | 1 or 0 |
| rollout_oldest_outstanding_age_seconds | age of the oldest group that has not ended |
| rollout_engine_up{engine}, rollout_engine_load{engine}, rollout_engine_slots{engine} | health, requests, bound |
| rollout_engine_behind{engine} | 1 while an engine reports older weights than the policy version, or missed an update |
| rollout_threads{state} | threads of programs and tools: free, busy, or stuck (told to end, and going on) |
| rollout_build_info{version,python} | always 1 |
| rollout_process_… | the process as prometheus-client reads it: CPU, memory, open files, start time |

| histogram | why its buckets |
| --- | --- |
| rollout_group_staleness | versions; max_staleness is mostly 0 to 8 |
| rollout_reward_mean | of delivered groups; most rewards lie in -1 to 1 |
| rollout_duration_seconds | a short answer takes 0.1 s, a long chain of thought half an hour |
| rollout_engine_request_seconds | the same |
| rollout_scoring_seconds | a regular expression takes 1 ms, a judge a minute |
| rollout_queue_seconds{queue} | pending and ready: from an instant to hours of a stopped trainer |
| rollout_lease_seconds | one training step: a second to an hour |
| rollout_store_commit_seconds | an fsync takes 0.1 ms to 100 ms; more is a sick disk |
| rollout_event_loop_lag_seconds | 1 ms is idle, 50 ms is the limit we set ourselves |
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollout_service import __version__
from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Group, Lease
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import DropReason, FailedRollout, FailureReason, FinishedRollout, GroupState
from rollout_service.core.scheduler import Blocked
from rollout_service.orchestrator.views import StatusView

LAG_INTERVAL_S = 0.02
"""Often enough to meet every stall of 20 ms, seldom enough to cost nothing."""

LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 1800)
SCORING = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
QUEUE = (0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
LEASE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
COMMIT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STALENESS = (0, 1, 2, 3, 4, 6, 8, 16)
REWARD = (-1, -0.5, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5)

UNMATCHED = "unmatched"
UNCONFIGURED = "unconfigured"
STATUS_CLASSES = ("2xx", "4xx", "5xx")
FAILED = "failed"
SHARED = "; of the whole run: with replicas the same at each, so take the max and not the sum"
"""Said of what every replica reads from the store they share. All else is its own, and adds up."""
LATE = "late"
WASTE_REASONS = ("stale", "reset", LATE, FAILED, *DropReason)
"""Tokens are wasted by staleness, a reset, a race lost, a failed rollout, or with a dropped group."""


class Fleet(Protocol):
    """What the gauges of engines are read from."""

    def describe(self) -> list[dict[str, Any]]: ...


class ThreadCounts(Protocol):
    """What the gauge of threads is read from."""

    @property
    def total(self) -> int: ...

    @property
    def busy(self) -> int: ...

    @property
    def stuck(self) -> int: ...


class Metrics:
    """Observer of the orchestrator, events of the engines, and the page for Prometheus."""

    def __init__(
        self, *, rewards: Sequence[str] = (), teachers: Sequence[str] = (), samples_alone: bool = False
    ) -> None:
        """`samples_alone`: each group is one sample, so that a stale group is a stale sample (distillation)."""
        # Process-wide, and the only setting of its kind in the library: `…_created` gauges are noise on every page.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
        self.registry = registry = CollectorRegistry()
        self._samples_alone = samples_alone
        self._teachers = (*teachers, UNCONFIGURED)
        self._routes: set[str] = set()
        self._newest: tuple[int, int, float] | None = None
        """Version, and number and sum of the mean rewards of its delivered groups."""

        def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
            made = Counter(name, text, [label] if label else [], registry=registry)
            for value in values:
                made.labels(str(value))
            return made

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._failed = counter("rollout_failed", "Rollouts that failed for good", "reason", FailureReason)
        self._dropped = counter("rollout_dropped_groups", "Groups dropped", "reason", DropReason)
        self._stale = counter("rollout_stale_groups", "Groups that lost work to a new version, once per attempt")
        self._stale_samples = counter("rollout_stale_samples", "Distillation: samples lost to a new version")
        self._failed_groups = counter("rollout_failed_groups", "Groups all of whose rollouts failed")
        self._delivered = counter("rollout_delivered_groups", "Groups handed out in new leases")
        self._delivered_tokens = counter("rollout_delivered_tokens", "Generated tokens of those groups")
        self._acked = counter("rollout_acked_groups", "Groups acked")
        self._finished = counter("rollout_finished", "Rollouts that survived")
        self._generated = counter("rollout_generated_tokens", "Tokens engines generated, as far as they answered")
        self._wasted = counter(
            "rollout_wasted_tokens", "Generated tokens that will not be delivered", "reason", WASTE_REASONS
        )
        self._aborts = counter("rollout_aborts", "Rollouts in flight that were stopped")
        self._engine_aborts = counter("rollout_engine_aborts", "Engine requests told to abort")
        self._abort_errors = counter("rollout_engine_abort_errors", "Engine requests whose abort call failed")
        self._retries = counter("rollout_retries", "Engine requests sent again", "reason", FailureReason)
        self._reward_errors = counter("rollout_reward_errors", "Groups a reward failed on", "reward", rewards)
        self._teacher_errors = counter(
            "rollout_teacher_errors", "Rollouts a teacher failed on", "teacher", self._teachers
        )
        self._halts = counter("rollout_halts", "Times dispatch halted")
        self._store_errors = counter("rollout_store_errors", "Commits that failed")
        self._http = Counter(
            "rollout_http_requests",
            "Requests answered, by method and route template, and class of status",
            ["route", "status"],
            registry=registry,
        )
        self._staleness = histogram("rollout_group_staleness", "Staleness of delivered groups", STALENESS)
        self._reward_mean = histogram("rollout_reward_mean", "Mean reward of delivered groups", REWARD)
        self._duration = histogram("rollout_duration_seconds", "From dispatch to settled, one rollout", LONG)
        self._request = histogram("rollout_engine_request_seconds", "One engine request that completed", LONG)
        self._scoring = histogram("rollout_scoring_seconds", "Scoring of one group", SCORING)
        queue = histogram("rollout_queue_seconds", "Time of a group in a queue", QUEUE, ["queue"])
        self._queue = {state: queue.labels(state.value) for state in (GroupState.PENDING, GroupState.READY)}
        self._lease = histogram("rollout_lease_seconds", "From lease to its end", LEASE)
        self._commit = histogram("rollout_store_commit_seconds", "One commit of the store", COMMIT)
        self._lag = histogram("rollout_event_loop_lag_seconds", "How late the event loop wakes a sleeper", LAG)
        prometheus_client.ProcessCollector(namespace="rollout", registry=registry)
        info = Gauge("rollout_build_info", "Always 1", ["version", "python"], registry=registry)
        info.labels(__version__, platform.python_version()).set(1)

    def watch(
        self, status: Callable[[], StatusView], fleet: Fleet, threads: Callable[[], ThreadCounts] | None = None
    ) -> None:
        """Read the gauges from these whenever somebody scrapes."""
        self.registry.register(_Gauges(status, fleet, threads, self._newest_reward))

    def _newest_reward(self) -> float | None:
        return None if self._newest is None else self._newest[2] / self._newest[1]

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, as `accept` wants it. Call on the event loop: the gauges are read here."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    async def measure_lag(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, loop.time() - due))

    # the orchestrator's Observer

    def group_moved(self, moved: Moved) -> None:
        before, after, kind = moved.before, moved.after, moved.kind
        if kind is EventKind.OUTDATED:
            self._stale.inc()
            if self._samples_alone:
                self._stale_samples.inc()
        elif kind is EventKind.ACKED:
            self._acked.inc()
        elif kind is EventKind.SCORED:
            self._scoring.observe(max(0.0, after.changed_at - before.changed_at))
        if before.state is GroupState.PENDING and after.state is GroupState.GENERATING:
            self._queue[GroupState.PENDING].observe(max(0.0, after.changed_at - before.changed_at))
        elif before.state is GroupState.READY and after.state is GroupState.LEASED:
            self._queue[GroupState.READY].observe(max(0.0, after.changed_at - before.changed_at))
        if after.state is GroupState.DROPPED and after.reason is not None:
            self._dropped.labels(after.reason.value).inc()
        elif after.state is GroupState.FAILED:
            self._failed_groups.inc()

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        self._duration.observe(seconds)
        if isinstance(outcome, FinishedRollout):
            self._finished.inc()
            self._generated.inc(outcome.output_tokens)
            return
        self._failed.labels(outcome.reason.value).inc()
        if outcome.wasted_tokens:
            self._generated.inc(outcome.wasted_tokens)
            self._wasted.labels(FAILED).inc(outcome.wasted_tokens)

    def rollouts_aborted(self, count: int) -> None:
        self._aborts.inc(count)

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        self._wasted.labels(reason if reason in WASTE_REASONS else "other").inc(tokens)
        if reason == LATE:  # the only ones that no settled rollout has counted
            self._generated.inc(tokens)

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        self._delivered.inc()
        self._delivered_tokens.inc(tokens)
        self._staleness.observe(staleness)
        if reward_mean is not None:
            self._reward_mean.observe(reward_mean)
            version = group.version or 0
            newest, n, total = self._newest or (version, 0, 0.0)
            if version > newest:
                newest, n, total = version, 0, 0.0
            if version == newest:
                self._newest = (newest, n + 1, total + reward_mean)

    def lease_ended(self, lease: Lease, seconds: float) -> None:
        self._lease.observe(max(0.0, seconds))

    def version_posted(self, bumped: Bumped) -> None:
        """The gauge is read from the run."""

    def halted(self, halt: Halt) -> None:
        self._halts.inc()

    def committed(self, seconds: float) -> None:
        self._commit.observe(seconds)

    def commit_failed(self, error: str) -> None:
        self._store_errors.inc()

    # the engines' events

    def retried(self, reason: FailureReason) -> None:
        self._retries.labels(reason.value).inc()

    def abort_issued(self, count: int) -> None:
        self._engine_aborts.inc(count)

    def abort_failed(self, count: int) -> None:
        self._abort_errors.inc(count)

    def request_done(self, seconds: float) -> None:
        self._request.observe(seconds)

    # rewards and HTTP

    def reward_error(self, reward: str) -> None:
        """A reward failed on a group. `reward` is a configured name."""
        self._reward_errors.labels(reward).inc()

    def teacher_error(self, teacher: str) -> None:
        """A teacher failed on a rollout. One that is configured no more, of which a stored prompt may speak, counts as
        `unconfigured`."""
        self._teacher_errors.labels(teacher if teacher in self._teachers else UNCONFIGURED).inc()

    def know_routes(self, routes: Iterable[str]) -> None:
        """Every series of requests, at 0: what clients ask for makes no new ones."""
        for route in (*routes, UNMATCHED):
            self._routes.add(route)
            for status in STATUS_CLASSES:
                self._http.labels(route, status)

    def request_answered(self, route: str, status: int) -> None:
        """`route`: method and template; one that nobody made known counts as unmatched."""
        self._http.labels(route if route in self._routes else UNMATCHED, f"{status // 100}xx").inc()


class _Gauges(Collector):
    """The run as it is at the scrape."""

    def __init__(
        self,
        status: Callable[[], StatusView],
        fleet: Fleet,
        threads: Callable[[], ThreadCounts] | None,
        newest_reward: Callable[[], float | None],
    ) -> None:
        self._status, self._fleet, self._threads, self._newest_reward = status, fleet, threads, newest_reward

    def describe(self) -> Iterable[Metric]:
        """Nothing: asking the run before it has started would be too early."""
        return ()

    def collect(self) -> Iterator[Metric]:
        view = self._status()
        counts, used = view.counts, view.slots_used
        submitted = CounterMetricFamily("rollout_submitted_groups", f"Groups submitted, over all restarts{SHARED}")
        submitted.add_metric([], counts.submitted)
        yield submitted
        by_state = {state.value: counts.groups.get(state, 0) for state in GroupState}
        yield _labelled("rollout_groups", f"Groups by state{SHARED}", "state", by_state)
        slots = {"free": max(0, view.slots_total - used), "used": used}
        yield _labelled("rollout_slots", "Slots for rollouts in flight", "state", slots)
        alive = sum(seen.expires_at > view.store_now for seen in view.replicas)
        oldest = 0.0 if view.oldest is None else max(0.0, view.now - view.oldest.submitted_at)
        for name, text, value in (
            ("rollout_inflight_rollouts", "Rollouts at engines now", used),
            ("rollout_policy_version", f"The current policy version{SHARED}", view.policy_version),
            ("rollout_max_staleness", f"Versions a group may be behind{SHARED}", view.max_staleness),
            ("rollout_leases", f"Live leases{SHARED}", view.leases),
            ("rollout_waiting_lease_calls", "Callers waiting for a lease", view.waiting_lease_calls),
            ("rollout_paused", f"1 while paused{SHARED}", view.paused),
            ("rollout_halted", f"1 while halted{SHARED}", view.halt is not None),
            ("rollout_replicas", f"Replicas alive that share the run, 0 where one service has it{SHARED}", alive),
            ("rollout_store_up", "1 while the store can commit", view.store_ok),
            ("rollout_oldest_outstanding_age_seconds", f"Age of the oldest group that has not ended{SHARED}", oldest),
        ):
            yield GaugeMetricFamily(name, text, float(value))
        blocked = {reason.value: view.blocked == reason.value for reason in Blocked}
        yield _labelled("rollout_blocked", f"1 for why no new group is opened now{SHARED}", "reason", blocked)
        if (mean := self._newest_reward()) is not None:
            yield GaugeMetricFamily("rollout_newest_reward_mean", "Mean reward of the newest version delivered", mean)
        if self._threads is not None:
            counted = self._threads()
            states = {"free": counted.total - counted.busy, "busy": counted.busy, "stuck": counted.stuck}
            yield _labelled("rollout_threads", "Threads of programs and tools", "state", states)
        engines = self._fleet.describe()
        up = {engine["id"]: engine["healthy"] for engine in engines}
        yield _labelled("rollout_engine_up", "1 while healthy", "engine", up)
        load = {engine["id"]: engine["in_flight"] for engine in engines}
        yield _labelled("rollout_engine_load", "Requests at an engine now", "engine", load)
        behind = {engine["id"]: engine.get("behind", False) for engine in engines}
        yield _labelled("rollout_engine_behind", "1 while it lacks the run's weights", "engine", behind)
        bound = {engine["id"]: engine["max_inflight"] for engine in engines}
        yield _labelled("rollout_engine_slots", "Most requests at once to an engine", "engine", bound)
        doubtful = {engine["id"]: engine.get("doubtful", False) for engine in engines}
        yield _labelled("rollout_engine_doubtful", "1 while it gets requests on trial only", "engine", doubtful)
        for name, text, field in (
            ("rollout_engine_waiting", "Requests in an engine's own queue, as it last said", "waiting"),
            ("rollout_engine_kv_usage_ratio", "Share of its KV cache in use, as it last said", "kv_usage"),
        ):
            said = {engine["id"]: engine[field] for engine in engines if engine.get(field) is not None}
            yield _labelled(name, text, "engine", said)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
