"""Replicas on PostgreSQL beside one service on SQLite: groups a second, what a group costs, how long calls take.

What is measured: one service on SQLite, and 1, 2 and 4 replicas on a PostgreSQL of their own that syncs to a real
disk; the same rollouts in flight over all of them, the same lean engine, the same trainer. Groups a second are what the
machine's cores allow, and everything runs on them: so CPU for a group stands beside it, of the services and of all
processes of the database, from which other machines can be reckoned. Then, with little else to do: a claim, a lease, an
ack, and the time from `POST /policy_version` at one of four replicas to the last abort of all of them, with
notifications and, through a PgBouncer in transaction mode, without.

    python -m benchmarks.replicas [--rounds 5] [--quick]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

import httpx
import pytest

from benchmarks import processes
from benchmarks.aborts import last_ends
from benchmarks.load import GROUP, MOST_WARM_UP, Times
from benchmarks.processes import Service, cpu_seconds, helpers_cpu_seconds, module, wait_for
from benchmarks.replicas_world import (
    Counted,
    commits_per_s,
    counted,
    database,
    database_server,
    pooled,
    server_cpu_seconds,
    services,
    urls,
)
from benchmarks.report import Figure, alternate, below, median, percentile, run_alone, say, shown
from benchmarks.serving import Engine, submit
from benchmarks.trainer import MAX_GROUPS, RANKS, Rank
from rollout_service.core.group import GroupPolicy
from rollout_service.core.scheduler import Policy
from rollout_service.core.shared import Replica
from rollout_service.observers import Quiet
from rollout_service.replicas.claims import Claims
from rollout_service.replicas.resident import Adopted, Resident
from rollout_service.store.postgres import PostgresStore
from tests.postgres_cluster import Cluster
from tests.postgres_pooler import pgbouncer
from trainer_client.binary import ACCEPT, decode_lease

COUNTS = (1, 2, 4)
SQLITE = "SQLite"
SQLITE_URL = "sqlite:///bench.db"
IN_FLIGHT, LATENCY_S, JITTER = 256, 0.05, 0.25
"""Of all replicas together: more than the cores can do, so that they are full whatever stands in the middle."""
TIMES, QUICK_TIMES = Times(4.0, 8.0), Times(2.0, 3.0)
MIN_GROUPS = 4
EXTRA_S = 150.0

CLAIM_EVERY_S = 0.05
CLAIMS, QUICK_CLAIMS = 200, 20
PENDING = 2000
STALENESS = 1
"""The service's default."""

LEASES, QUICK_LEASES, LEASED = 60, 10, 8
FILL_S = 120.0

BUMPED, BUMP_IN_FLIGHT = 4, 256
BUMP_LATENCY_S = 600.0
"""So long that only an abort ends a request."""
POSTS, FEWEST_POSTS, QUICK_POSTS = 40, 8, 2
"""Of all rounds together; of one."""
SETTLE_S = 1.2
"""Younger requests are told to abort twice, in case the abort overtakes them."""
WITHIN_S = 30.0
PUSHED, POLLED = "pushed", "polled"
WAYS = {PUSHED: "by notifications", POLLED: "by polling, through PgBouncer in transaction mode"}

MACHINE_NOTE = (
    "Services, database, engine and trainer share the machine's cores, and fill them: more replicas cannot give more "
    "here. What they would give elsewhere follows from CPU for a group: a replica has one core to itself, the database "
    "as many as it has."
)


Milliseconds = tuple[float, ...]


def name_of(count: int) -> str:
    """Of a way to run the services; 0: one on SQLite."""
    if count == 0:
        return SQLITE
    return f"{count} replica{'s' if count > 1 else ''}"


# --- groups a second, and what a group costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the trainer's process is asked to do."""

    urls: list[str]
    pids: list[int]
    server: int | None
    """First process of the PostgreSQL."""
    database: str | None
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run under full load. CPU, commits and the like are for one group delivered and acked."""

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
class Mark:
    """Where the counters stood."""

    at: float
    acked: int
    finished: int
    service_s: float
    helpers_s: float
    server_s: float
    counted: Counted


def load(engine_url: str, cluster: Cluster, count: int, times: Times) -> Load:
    """`count` replicas under full load; 0: one service on SQLite."""
    processes.new_run(engine_url)
    with ExitStack() as stack:
        url = SQLITE_URL if count == 0 else stack.enter_context(database(cluster))
        running = stack.enter_context(services(max(1, count), engine_url, store=url, in_flight=IN_FLIGHT, file=True))
        server, shared = (None, None) if count == 0 else (cluster.pid(), url)
        job = Job(urls=urls(running), pids=pids(running), server=server, database=shared, times=times)
        with training(job) as found:
            # After the window: what one more claimer costs is no part of the load.
            return found if shared is None else replace(found, claim_ms=asyncio.run(_claims_beside(shared, times)))


@contextmanager
def training(job: Job) -> Iterator[Load]:
    """What a trainer found in its window; it goes on until the block ends."""
    # Not by `processes.process`, which pins.
    command = module("benchmarks.replicas", "--train", json.dumps(asdict(job)))
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=processes.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        try:
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("the trainer has no pipes")
            line = child.stdout.readline()
            if not line:
                child.wait()
                errors.seek(0)
                raise RuntimeError(f"the trainer ended with {child.returncode}:\n{errors.read()[-2000:]}")
            yield Load(**json.loads(line))
            child.stdin.close()
            child.wait(EXTRA_S)
        finally:
            child.kill()


async def _claims_beside(url: str, times: Times) -> Milliseconds:
    async with claimer(url) as claims:
        return await _claim(claims, round(times.window_s / 2 / CLAIM_EVERY_S), every_s=CLAIM_EVERY_S)


def train(job: Job) -> None:
    """Leases and acks at every replica until stdin ends; prints one JSON line about the window."""
    stop = threading.Event()
    at = [job.urls[number % len(job.urls)] for number in range(max(RANKS, len(job.urls)))]
    ranks = [Rank(url, MIN_GROUPS, max(MAX_GROUPS, IN_FLIGHT // GROUP), stop) for url in at]
    for rank in ranks:
        rank.start()

    def acked() -> int:
        if not all(rank.is_alive() for rank in ranks):
            raise RuntimeError("a rank of the trainer has failed; its traceback is above")
        return sum(rank.acked for rank in ranks)

    begun = time.monotonic()
    while (now := time.monotonic()) < begun + job.times.warm_up_s or (
        acked() < IN_FLIGHT and now < begun + MOST_WARM_UP * job.times.warm_up_s
    ):
        time.sleep(0.05)
    first = _mark(job, acked())
    time.sleep(job.times.window_s)
    last = _mark(job, acked())
    print(json.dumps(asdict(difference(first, last))), flush=True)
    sys.stdin.read()
    stop.set()
    for rank in ranks:
        rank.join()


def _mark(job: Job, acked: int) -> Mark:
    finished = 0
    for url in job.urls:
        page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
        line = next(line for line in page.splitlines() if line.startswith("rollout_finished_total "))
        finished += round(float(line.rpartition(" ")[2]))
    nothing = Counted(commits=0, wal_bytes=0, busy_ms=0.0, moves=0)
    return Mark(
        at=time.monotonic(),
        acked=acked,
        finished=finished,
        service_s=sum(map(cpu_seconds, job.pids)),
        helpers_s=sum(map(helpers_cpu_seconds, job.pids)),
        server_s=0.0 if job.server is None else server_cpu_seconds(job.server),
        counted=nothing if job.database is None else asyncio.run(counted(job.database)),
    )


def difference(first: Mark, last: Mark) -> Load:
    """What one group cost between two marks. RuntimeError where none was delivered."""
    groups = max(0, min(last.acked - first.acked, last.finished - first.finished)) / GROUP
    if groups == 0:
        raise RuntimeError("no group was delivered in the window")
    before, after = first.counted, last.counted
    commits = after.commits - before.commits
    transaction_ms = (after.busy_ms - before.busy_ms) / max(1, commits)
    return Load(
        groups_per_s=groups / (last.at - first.at),
        service_cpu_ms=1000 * (last.service_s - first.service_s) / groups,
        helpers_cpu_ms=1000 * (last.helpers_s - first.helpers_s) / groups,
        server_cpu_ms=1000 * (last.server_s - first.server_s) / groups,
        commits=commits / groups,
        wal_bytes=(after.wal_bytes - before.wal_bytes) / groups,
        held_ms=transaction_ms * (after.moves - before.moves) / groups,
        transaction_ms=transaction_ms,
    )


def pids(running: Sequence[Service]) -> list[int]:
    return [service.pid for service in running]


# --- one claim


class _Slots:
    """What a claimer asks of who works for the groups: there is always room, and nobody works."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id, self.away, self.closing, self.free = replica_id, False, False, GROUP
        self.claims: dict[int, int] = {}

    def adopt(self, adopted: Adopted) -> None:
        self.claims.update(adopted.claims)


@asynccontextmanager
async def claimer(url: str) -> AsyncIterator[Claims]:
    """One more replica of the run, which claims and does nothing else; gives everything back."""
    store = PostgresStore(url, max_staleness=STALENESS, pool_size=2)
    replica_id = f"claimer-{time.monotonic_ns()}"
    await store.open()
    try:
        known = [seen.replica for seen in (await store.overview()).replicas]
        like = known[0] if known else Replica(replica_id="", name="", service="", rules="")
        await store.join(replace(like, replica_id=replica_id, name="claimer", slots=0), lease_s=300)
        policy = Policy(group=GroupPolicy(max_staleness=STALENESS), slots=GROUP, max_ready_groups=1_000_000)
        yield Claims(store, cast(Resident, _Slots(replica_id)), policy, Quiet())
        await store.leave(replica_id)
    finally:
        await store.close()


async def _claim(claims: Claims, count: int, *, every_s: float = 0.0) -> Milliseconds:
    """Of `count` claims of one group each; those that found none are left out, and the first, which prepares its
    statements."""
    found = []
    for number in range(count + 1):
        began = time.perf_counter()
        if await claims.claim(GROUP) and number:
            found.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(every_s)
    return tuple(found)


def quiet_claims(engine_url: str, cluster: Cluster, count: int) -> Milliseconds:
    """Of `count` claims of one group each, with nothing else to do."""

    async def claimed(url: str) -> Milliseconds:
        async with claimer(url) as claims:
            return await _claim(claims, count)

    with database(cluster) as url:
        with services(1, engine_url, store=url, in_flight=GROUP, file=False) as running:
            httpx.post(f"{running[0].url}/pause", timeout=30).raise_for_status()
            submit(running[0].url, count + PENDING)
            httpx.post(f"{running[0].url}/resume", timeout=30).raise_for_status()
        return asyncio.run(claimed(url))


# --- one lease, one ack


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Single calls of a trainer, one after the other, with nothing else to do."""

    lease_ms: Milliseconds
    ack_ms: Milliseconds


def calls(engine_url: str, cluster: Cluster, count: int, leases: int) -> Calls:
    """Leases of `LEASED` ready groups each and their acks, at `count` replicas in turn; 0: one service on SQLite."""
    with ExitStack() as stack:
        url = SQLITE_URL if count == 0 else stack.enter_context(database(cluster))
        running = stack.enter_context(services(max(1, count), engine_url, store=url, in_flight=IN_FLIGHT, file=False))
        submit(running[0].url, leases * LEASED)
        clients = [stack.enter_context(httpx.Client(base_url=one.url, timeout=60)) for one in running]

        def ready() -> bool:
            groups = clients[0].get("/status").raise_for_status().json()["groups"]
            return bool(groups["ready"] >= leases * LEASED)

        wait_for(ready, FILL_S, f"{leases * LEASED} groups are ready")
        times = [_lease(clients[number % len(clients)]) for number in range(leases)]
    del times[: len(running)]  # the first at each connects and prepares its statements
    return Calls(lease_ms=tuple(lease for lease, _ in times), ack_ms=tuple(ack for _, ack in times))


def _lease(http: httpx.Client) -> tuple[float, float]:
    """Milliseconds of a lease, and of its ack."""
    began = time.perf_counter()
    body = {"max_groups": LEASED, "min_groups": LEASED, "wait_s": 5}
    answer = http.post("/leases", json=body, headers={"accept": ACCEPT}).raise_for_status()
    answered = time.perf_counter()
    lease = decode_lease(answer.content)
    if len(lease.groups) != LEASED:
        raise RuntimeError(f"a lease has {len(lease.groups)} groups")
    asked = time.perf_counter()
    http.post(f"/leases/{lease.lease_id}/ack").raise_for_status()
    return 1000 * (answered - began), 1000 * (time.perf_counter() - asked)


# --- a new version


@dataclass(frozen=True, slots=True, kw_only=True)
class Bumps:
    """From the call of `POST /policy_version`, one value a post."""

    aborted_ms: Milliseconds
    """To the end of the last stale request of any replica, by the engine's journal."""
    answered_ms: Milliseconds
    """To the answer."""


def bumps(engine_url: str, cluster: Cluster, posts: int, *, pooler: bool) -> Bumps:
    """Versions posted at each of `BUMPED` replicas in turn, with all their slots busy."""
    processes.new_run(engine_url)
    with ExitStack() as stack:
        url = stack.enter_context(database(cluster))
        if pooler:
            url = stack.enter_context(pooled(cluster, url))
        tables = {"groups": {"max_staleness": 0, "num_generations": GROUP, "max_pending_groups": 20_000}}
        running = stack.enter_context(
            services(BUMPED, engine_url, store=url, in_flight=BUMP_IN_FLIGHT, file=False, tables=tables)
        )
        clients = [stack.enter_context(httpx.Client(base_url=one.url, timeout=60)) for one in running]
        engine = Engine(url=engine_url)
        submit(running[0].url, (posts + 2) * BUMP_IN_FLIGHT // GROUP)
        sent, answered = [], []
        for version in range(1, posts + 1):
            http = clients[version % BUMPED]
            http.get("/livez").raise_for_status()  # connected before a time counts
            wait_for(lambda: engine.running() == BUMP_IN_FLIGHT, WITHIN_S, f"{BUMP_IN_FLIGHT} rollouts in flight")
            time.sleep(SETTLE_S)
            sent.append(time.monotonic())
            http.post("/policy_version", json={"version": version}).raise_for_status()
            answered.append(1000 * (time.monotonic() - sent[-1]))
        wait_for(lambda: engine.running() == BUMP_IN_FLIGHT, WITHIN_S, f"{BUMP_IN_FLIGHT} rollouts in flight")
        aborted = last_ends(engine.journal(), sent, BUMP_IN_FLIGHT)
    return Bumps(aborted_ms=tuple(aborted), answered_ms=tuple(answered))


def _bump_ways(engine_url: str, cluster: Cluster, posts: int) -> dict[str, Callable[[], Bumps]]:
    ways: dict[str, Callable[[], Bumps]] = {PUSHED: partial(bumps, engine_url, cluster, posts, pooler=False)}
    try:
        pgbouncer()
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        say(f"no figures of polling: {error}")
    else:
        ways[POLLED] = partial(bumps, engine_url, cluster, posts, pooler=True)
    return ways


# --- the figures


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    times = QUICK_TIMES if quick else TIMES
    with database_server() as cluster:
        floor = {clients: commits_per_s(cluster, clients, 1 if quick else 5) for clients in (1, 16)}
        with processes.lean_engine(LATENCY_S, jitter=JITTER) as engine_url:
            counts = {SQLITE: 0} | {name_of(count): count for count in COUNTS}
            loads = alternate(
                rounds, {name: partial(load, engine_url, cluster, count, times) for name, count in counts.items()}
            )
            number = QUICK_CLAIMS if quick else CLAIMS
            quiet = alternate(rounds, {"claims": partial(quiet_claims, engine_url, cluster, number)})["claims"]
            number = QUICK_LEASES if quick else LEASES
            leases = alternate(
                rounds,
                {name: partial(calls, engine_url, cluster, counts[name], number) for name in (SQLITE, name_of(2))},
            )
        posts = QUICK_POSTS if quick else max(FEWEST_POSTS, -(-POSTS // rounds))
        with processes.lean_engine(BUMP_LATENCY_S) as engine_url:
            told = alternate(rounds, _bump_ways(engine_url, cluster, posts))
    return [*_rates(loads), *_costs(loads, floor), *_claims(quiet, loads), *_calls(leases), *_bumps(told)]


def _rates(loads: Mapping[str, Sequence[Load]]) -> list[Figure]:
    figures = []
    for count in (0, *COUNTS):
        runs = loads[name_of(count)]
        rate = median(run.groups_per_s for run in runs)
        cores = median(run.groups_per_s * (run.service_cpu_ms + run.helpers_cpu_ms + run.server_cpu_ms) for run in runs)
        figures.append(
            Figure(
                key=f"replicas_groups_per_s_{count or 'sqlite'}",
                what=f"groups/s delivered and acked by {name_of(count)}, {IN_FLIGHT} in flight in all",
                value=rate,
                unit="/s",
                beside=f"{shown(GROUP * rate, '/s')} completions; {cores / 1000:.2f} cores, {os.cpu_count()} there are",
                runs=tuple(run.groups_per_s for run in runs),
                note=MACHINE_NOTE,
            )
        )
    return figures


def _costs(loads: Mapping[str, Sequence[Load]], floor: Mapping[int, float]) -> list[Figure]:
    figures = []
    for count in (0, *COUNTS):
        runs = loads[name_of(count)]
        helpers = median(run.helpers_cpu_ms for run in runs)
        figures.append(
            Figure(
                key=f"replicas_service_cpu_ms_{count or 'sqlite'}",
                what=f"CPU of {name_of(count)} for a group of {GROUP} completions",
                value=median(run.service_cpu_ms for run in runs),
                unit="ms",
                beside=f"reward workers {shown(helpers, 'ms')}",
                runs=tuple(run.service_cpu_ms for run in runs),
            )
        )
    for count in COUNTS:
        runs = loads[name_of(count)]
        value = median(run.server_cpu_ms for run in runs)
        figures += [
            Figure(
                key=f"replicas_database_cpu_ms_{count}",
                what=f"CPU of all PostgreSQL's processes for a group, {name_of(count)}",
                value=value,
                unit="ms",
                beside=f"{shown(1000 / value, '/s')} groups for each core of the database; "
                f"{median(run.wal_bytes for run in runs) / 1000:.1f} kB of WAL",
                runs=tuple(run.server_cpu_ms for run in runs),
            ),
            Figure(
                key=f"replicas_transactions_{count}",
                what=f"transactions for a group, {name_of(count)}",
                value=median(run.commits for run in runs),
                beside=f"{shown(median(run.transaction_ms for run in runs), 'ms')} each; a group's row is locked "
                f"{shown(median(run.held_ms for run in runs), 'ms')} in its life",
                runs=tuple(run.commits for run in runs),
            ),
        ]
    figures.append(
        Figure(
            key="postgres_commits_per_s",
            what="durable commits/s of this PostgreSQL, one row each, 16 at a time (pgbench)",
            value=floor[16],
            unit="/s",
            beside=f"one at a time {shown(floor[1], '/s')}, {shown(1000 / floor[1], 'ms')} each",
        )
    )
    return figures


def _claims(quiet: Sequence[Milliseconds], loads: Mapping[str, Sequence[Load]]) -> list[Figure]:
    figures = [_latency("claim", f"one claim of a group among {PENDING:,} pending ones, nothing else to do", quiet)]
    for count in COUNTS:
        full = [run.claim_ms for run in loads[name_of(count)] if run.claim_ms]
        if full:
            what = f"the same by one more beside {name_of(count)} under full load"
            figures.append(_latency(f"claim_full_{count}", what, full))
        else:
            say(f"no figure of claims beside {name_of(count)}: nothing was pending")
    return figures


def _calls(leases: Mapping[str, Sequence[Calls]]) -> list[Figure]:
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


def _bumps(told: Mapping[str, Sequence[Bumps]]) -> list[Figure]:
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


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        given = json.loads(sys.argv[2])
        train(Job(**given | {"times": Times(*given["times"])}))
    else:
        run_alone(measure, "replicas on PostgreSQL beside one service on SQLite")


if __name__ == "__main__":
    main()
