"""What a run of `benchmarks.replicas` found, and the figures made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load import GROUP
from benchmarks.report import Figure, below, median, percentile, say, shown

COUNTS = (1, 2, 4)
SQLITE = "SQLite"
PENDING = 2000
"""Groups among which the claims with nothing else to do are made."""
LEASED = 8
"""Groups of a lease with nothing else to do."""
BUMPED, BUMP_IN_FLIGHT = 4, 256
"""Replicas, and rollouts in flight over all of them, that hear of a version."""
PUSHED, POLLED = "pushed", "polled"
WAYS = {PUSHED: "by notifications", POLLED: "by polling, through PgBouncer in transaction mode"}

MACHINE_NOTE = (
    "Services, database, engine and trainer share the machine's cores, and fill them: more replicas cannot give more "
    "here. What they would give elsewhere follows from CPU for a group: a replica has one core to itself, the database "
    "as many as it has."
)


Milliseconds = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A load: `in_flight` rollouts over all replicas, of `latency_s` each."""

    in_flight: int
    latency_s: float
    min_groups: int
    """Of a lease."""


FULL = Setting(in_flight=256, latency_s=0.05, min_groups=4)
"""More than the cores can do: they are full whatever stands in the middle, and much is written together."""
CALM = Setting(in_flight=128, latency_s=1.0, min_groups=2)
"""128 completions a second, well below what one core can do: nearly each is written alone."""


def name_of(count: int) -> str:
    """Of a way to run the services; 0: one on SQLite."""
    if count == 0:
        return SQLITE
    return f"{count} replica{'s' if count > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run under a load. CPU, commits and the like are for one group delivered and acked."""

    groups_per_s: float
    service_cpu_ms: float
    """Of all services."""
    helpers_cpu_ms: float
    """Of their reward workers."""
    server_cpu_ms: float = 0.0
    commits: float = 0.0
    wal_bytes: float = 0.0
    held_ms: float = 0.0
    """Time its row was locked, about: the mean length of a transaction for each of its updates."""
    transaction_ms: float = 0.0
    claim_ms: Milliseconds = ()
    """Of single claims by one more claimer meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Single calls of a trainer, one after the other, with nothing else to do."""

    lease_ms: Milliseconds
    ack_ms: Milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bumps:
    """From the call of `POST /policy_version`, one value a post."""

    aborted_ms: Milliseconds
    """To the end of the last stale request of any replica, by the engine's journal."""
    answered_ms: Milliseconds
    """To the answer."""


def rates_figures(loads: Mapping[str, Sequence[Load]]) -> list[Figure]:
    figures = []
    for count in (0, *COUNTS):
        runs = loads[name_of(count)]
        rate = median(run.groups_per_s for run in runs)
        cores = median(run.groups_per_s * (run.service_cpu_ms + run.helpers_cpu_ms + run.server_cpu_ms) for run in runs)
        figures.append(
            Figure(
                key=f"replicas_groups_per_s_{count or 'sqlite'}",
                what=f"groups/s delivered and acked by {name_of(count)}, {FULL.in_flight} in flight in all",
                value=rate,
                unit="/s",
                beside=f"{shown(GROUP * rate, '/s')} completions; {cores / 1000:.2f} cores, {os.cpu_count()} there are",
                runs=tuple(run.groups_per_s for run in runs),
                note=MACHINE_NOTE,
            )
        )
    return figures


def costs_figures(loads: Mapping[str, Sequence[Load]], title: str, suffix: str) -> list[Figure]:
    figures = []
    for count in (0, *COUNTS):
        runs = loads[name_of(count)]
        helpers = median(run.helpers_cpu_ms for run in runs)
        rate = median(run.groups_per_s for run in runs)
        figures.append(
            Figure(
                key=f"replicas_service_cpu_ms_{count or 'sqlite'}{suffix}",
                what=f"CPU of {name_of(count)} for a group of {GROUP} completions, {title}",
                value=median(run.service_cpu_ms for run in runs),
                unit="ms",
                beside=f"reward workers {shown(helpers, 'ms')}; {shown(rate, '/s')} groups",
                runs=tuple(run.service_cpu_ms for run in runs),
            )
        )
    for count in COUNTS:
        runs = loads[name_of(count)]
        value = median(run.server_cpu_ms for run in runs)
        figures += [
            Figure(
                key=f"replicas_database_cpu_ms_{count}{suffix}",
                what=f"CPU of all PostgreSQL's processes for a group, {name_of(count)}, {title}",
                value=value,
                unit="ms",
                beside=f"{shown(1000 / value, '/s')} groups for each core of the database; "
                f"{median(run.wal_bytes for run in runs) / 1000:.1f} kB of WAL",
                runs=tuple(run.server_cpu_ms for run in runs),
            ),
            Figure(
                key=f"replicas_transactions_{count}{suffix}",
                what=f"transactions for a group, {name_of(count)}, {title}",
                value=median(run.commits for run in runs),
                beside=f"{shown(median(run.transaction_ms for run in runs), 'ms')} each; a group's row is locked "
                f"{shown(median(run.held_ms for run in runs), 'ms')} in its life",
                runs=tuple(run.commits for run in runs),
            ),
        ]
    return figures


def floor_figure(floor: Mapping[int, float]) -> Figure:
    return Figure(
        key="postgres_commits_per_s",
        what="durable commits/s of this PostgreSQL, one row each, 16 at a time (pgbench)",
        value=floor[16],
        unit="/s",
        beside=f"one at a time {shown(floor[1], '/s')}, {shown(1000 / floor[1], 'ms')} each",
    )


def claims_figures(quiet: Sequence[Milliseconds], loads: Mapping[str, Sequence[Load]]) -> list[Figure]:
    figures = [_latency("claim", f"one claim of a group among {PENDING:,} pending ones, nothing else to do", quiet)]
    for count in COUNTS:
        full = [run.claim_ms for run in loads[name_of(count)] if run.claim_ms]
        if full:
            what = f"the same by one more beside {name_of(count)} under full load"
            figures.append(_latency(f"claim_full_{count}", what, full))
        else:
            say(f"no figure of claims beside {name_of(count)}: nothing was pending")
    return figures


def calls_figures(leases: Mapping[str, Sequence[Calls]]) -> list[Figure]:
    replicas, alone = leases[name_of(2)], leases[SQLITE]
    return [
        _latency(
            f"{call}_replica",
            f"{title} of {LEASED} ready groups through a replica, nothing else to do",
            [getattr(run, f"{call}_ms") for run in replicas],
            beside=[getattr(run, f"{call}_ms") for run in alone],
        )
        for call, title in (("lease", "a lease"), ("ack", "an ack"))
    ]


def _latency(key: str, what: str, runs: Sequence[Milliseconds], beside: Sequence[Milliseconds] = ()) -> Figure:
    """A median, with the p99 of all beside it."""
    everything = [value for run in runs for value in run]
    text = f"p99 {shown(percentile(everything, 0.99), 'ms')} of {len(everything)}"
    if beside:
        others = [value for run in beside for value in run]
        text += f"; {SQLITE} {shown(median(others), 'ms')}, p99 {shown(percentile(others, 0.99), 'ms')}"
    return Figure(
        key=f"{key}_ms", what=what, value=median(everything), unit="ms", beside=text, runs=tuple(map(median, runs))
    )


def bumps_figures(told: Mapping[str, Sequence[Bumps]]) -> list[Figure]:
    figures = []
    for way, runs in told.items():
        aborted = [value for run in runs for value in run.aborted_ms]
        answered = [value for run in runs for value in run.answered_ms]
        figures.append(
            Figure(
                key=f"bump_p99_ms_{BUMPED}_{way}",
                what=f"from POST /policy_version at one of {BUMPED} replicas to the last abort, p99, {WAYS[way]}",
                value=percentile(aborted, 0.99),
                unit="ms",
                beside=f"median {shown(median(aborted), 'ms')} of {len(aborted)}; the answer came after "
                f"{shown(median(answered), 'ms')}, p99 {shown(percentile(answered, 0.99), 'ms')}",
                goal=below(250),
                runs=tuple(percentile(run.aborted_ms, 0.99) for run in runs),
                note=f"{BUMP_IN_FLIGHT} rollouts in flight over all; after a version they are started again meanwhile.",
            )
        )
    return figures
