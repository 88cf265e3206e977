"""Replicas on PostgreSQL beside one service on SQLite: groups a second, what a group costs, how long calls take.

What is measured: one service on SQLite, and 1, 2 and 4 replicas on a PostgreSQL of their own that syncs to a real
disk; the same rollouts in flight over all of them, the same lean engine, the same trainer. Groups a second are what the
machine's cores allow, and everything runs on them: so CPU for a group stands beside it, of the services and of all
processes of the database, from which other machines can be reckoned; at full load and at a rate far below. Then, with
little else to do: a claim, a lease, an ack, and the time from `POST /policy_version` at one of four replicas to the
last abort of all of them, with notifications and, through a PgBouncer in transaction mode, without.

    python -m benchmarks.replicas [--rounds 5] [--quick]
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import httpx
import pytest

from benchmarks import processes
from benchmarks.aborts import last_ends
from benchmarks.load import GROUP, MOST_WARM_UP, Times
from benchmarks.processes import cpu_seconds, helpers_cpu_seconds, module, wait_for
from benchmarks.replicas_figures import (
    BUMP_IN_FLIGHT,
    BUMPED,
    CALM,
    COUNTS,
    FULL,
    LEASED,
    PENDING,
    POLLED,
    PUSHED,
    Bumps,
    Calls,
    Load,
    Milliseconds,
    Setting,
    bumps_figures,
    calls_figures,
    claims_figures,
    costs_figures,
    floor_figure,
    name_of,
    rates_figures,
)
from benchmarks.replicas_world import (
    Counted,
    commits_per_s,
    counted,
    database,
    database_server,
    pooled,
    server_cpu_seconds,
    services,
)
from benchmarks.report import Figure, alternate, run_alone, say
from benchmarks.serving import Engine, submit
from benchmarks.trainer import MAX_GROUPS, RANKS, Rank
from rollout_service.core.group import GroupPolicy
from rollout_service.core.scheduler import Policy
from rollout_service.core.shared import Replica, SharedRun
from rollout_service.observers import Quiet
from rollout_service.replicas.claims import Claims
from rollout_service.replicas.resident import Adopted
from rollout_service.store.postgres import PostgresStore
from tests.postgres_cluster import Cluster
from tests.postgres_pooler import pgbouncer
from trainer_client.binary import ACCEPT, decode_lease

SQLITE_URL = "sqlite:///bench.db"
JITTER = 0.25
TIMES, QUICK_TIMES = Times(4.0, 8.0), Times(2.0, 3.0)
EXTRA_S = 150.0

CLAIM_EVERY_S = 0.05
CLAIMS, QUICK_CLAIMS = 200, 20
STALENESS = 1
"""The service's default."""

LEASES, QUICK_LEASES = 60, 10
FILL_S = 120.0

BUMP_LATENCY_S = 600.0
"""So long that only an abort ends a request."""
POSTS, FEWEST_POSTS, QUICK_POSTS = 40, 8, 2
"""Of all rounds together; of one."""
SETTLE_S = 1.2
"""Younger requests are told to abort twice, in case the abort overtakes them."""
WITHIN_S = 30.0
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
    in_flight: int
    min_groups: int


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


def load(engine_url: str, cluster: Cluster, setting: Setting, count: int, times: Times) -> Load:
    """`count` replicas under a load; 0: one service on SQLite."""
    processes.new_run(engine_url)
    with ExitStack() as stack:
        url = SQLITE_URL if count == 0 else stack.enter_context(database(cluster))
        running = stack.enter_context(
            services(max(1, count), engine_url, store=url, in_flight=setting.in_flight, file=True)
        )
        job = Job(
            urls=[service.url for service in running],
            pids=[service.pid for service in running],
            server=cluster.pid() if count else None,
            database=url if count else None,
            times=times,
            in_flight=setting.in_flight,
            min_groups=setting.min_groups,
        )
        with training(job) as found:
            # After the window: what one more claimer costs is no part of the load.
            return replace(found, claim_ms=asyncio.run(_claims_beside(url, times))) if count else found


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
    ranks = [Rank(url, job.min_groups, max(MAX_GROUPS, job.in_flight // GROUP), stop) for url in at]
    for rank in ranks:
        rank.start()

    def acked() -> int:
        if not all(rank.is_alive() for rank in ranks):
            raise RuntimeError("a rank of the trainer has failed; its traceback is above")
        return sum(rank.acked for rank in ranks)

    begun = time.monotonic()
    while (now := time.monotonic()) < begun + job.times.warm_up_s or (
        acked() < job.in_flight and now < begun + MOST_WARM_UP * job.times.warm_up_s
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


# --- one claim


class _Slots:
    """What a claimer asks of who works for the groups: there is always room, and nobody works."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id, self.away, self.closing, self.taken = replica_id, False, False, 0
        self.claims: dict[int, int] = {}

    @property
    def free(self) -> int:
        return GROUP

    async def follow(self, run: SharedRun) -> None:
        """Nothing is worked for."""

    def deals_with(self, seqs: Collection[int]) -> bool:
        return False

    async def settled(self) -> None:
        """Nothing ever is under way."""

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
        yield Claims(store, _Slots(replica_id), policy, Quiet())
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


def calls(engine_url: str, cluster: Cluster, count: int, leases: int) -> Calls:
    """Leases of `LEASED` ready groups each and their acks, at `count` replicas in turn; 0: one service on SQLite."""
    with ExitStack() as stack:
        url = SQLITE_URL if count == 0 else stack.enter_context(database(cluster))
        running = stack.enter_context(
            services(max(1, count), engine_url, store=url, in_flight=FULL.in_flight, file=False)
        )
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
    with database_server() as cluster:
        floor = {clients: commits_per_s(cluster, clients, 1 if quick else 5) for clients in (1, 16)}
        calm = _loads(cluster, CALM, rounds, quick=quick)
        full = _loads(cluster, FULL, rounds, quick=quick)
        with processes.lean_engine(FULL.latency_s, jitter=JITTER) as engine_url:
            number = QUICK_CLAIMS if quick else CLAIMS
            quiet = alternate(rounds, {"claims": partial(quiet_claims, engine_url, cluster, number)})["claims"]
            number = QUICK_LEASES if quick else LEASES
            ways = {name_of(count): partial(calls, engine_url, cluster, count, number) for count in (0, 2)}
            leases = alternate(rounds, ways)
        posts = QUICK_POSTS if quick else max(FEWEST_POSTS, -(-POSTS // rounds))
        with processes.lean_engine(BUMP_LATENCY_S) as engine_url:
            told = alternate(rounds, _bump_ways(engine_url, cluster, posts))
    return [
        *rates_figures(full),
        *costs_figures(full, "full load", ""),
        *costs_figures(calm, f"{CALM.in_flight / CALM.latency_s:g} completions/s", "_calm"),
        floor_figure(floor),
        *claims_figures(quiet, full),
        *calls_figures(leases),
        *bumps_figures(told),
    ]


def _loads(cluster: Cluster, setting: Setting, rounds: int, *, quick: bool) -> Mapping[str, Sequence[Load]]:
    times = QUICK_TIMES if quick else TIMES
    with processes.lean_engine(setting.latency_s, jitter=JITTER, stagger=setting.in_flight) as engine_url:
        ways = {name_of(count): partial(load, engine_url, cluster, setting, count, times) for count in (0, *COUNTS)}
        return alternate(rounds, ways)


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        given = json.loads(sys.argv[2])
        train(Job(**given | {"times": Times(*given["times"])}))
    else:
        run_alone(measure, "replicas on PostgreSQL beside one service on SQLite")


if __name__ == "__main__":
    main()
