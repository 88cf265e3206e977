"""A PostgreSQL of a benchmark's own, services beside it, and what kernel and database counted for a stretch of time.

What always holds: the database syncs (fsync, synchronous_commit and full_page_writes on) to a folder on a real disk;
nothing is pinned, because replicas, database, engine and trainer are more than the cores of a small machine; whatever
was started has ended when its block ends. CPU of the database is that of all its processes, those that ended included.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from benchmarks import processes, serving
from benchmarks.load import PROMPTS_FILE, REWARDS, prompts
from benchmarks.processes import TICK, Service
from tests.postgres_cluster import Cluster, program
from tests.postgres_pooler import running_pooler

SYNCED = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "max_connections": "200"}
"""All else is PostgreSQL's default."""
POOLED_CONNECTIONS = 40
"""Of the pooler to the database: nobody waits for one."""
PROMPTS = 5000
"""In the file; it is read again and again."""
REWARD_WORKERS = 4
"""Of all replicas together."""

_names = itertools.count(1)


class Missing(RuntimeError):
    """A program that is not installed; it says which."""


@contextmanager
def database_server() -> Iterator[Cluster]:
    """Raises Missing."""
    try:
        cluster = Cluster(SYNCED)
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        raise Missing(str(error)) from error
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@contextmanager
def database(cluster: Cluster) -> Iterator[str]:
    """The URL of an empty database; it goes with the block."""
    name = f"bench_{next(_names)}"
    asyncio.run(cluster.execute(f"CREATE DATABASE {name}"))
    try:
        yield cluster.url(name)
    finally:
        asyncio.run(cluster.execute(f"DROP DATABASE {name} WITH (FORCE)"))


@contextmanager
def pooled(cluster: Cluster, url: str) -> Iterator[str]:
    """`url` through a PgBouncer in transaction mode. Raises Missing."""
    with ExitStack() as stack:
        folder = stack.enter_context(processes.folder())
        try:
            pooler = stack.enter_context(running_pooler(cluster, folder, size=POOLED_CONNECTIONS))
        except (pytest.skip.Exception, pytest.fail.Exception) as error:
            raise Missing(str(error)) from error
        yield pooler.url(url)


@contextmanager
def services(
    count: int, engine_url: str, *, store: str, in_flight: int, file: bool, tables: serving.Tables | None = None
) -> Iterator[list[Service]]:
    """`count` services on one store, ready, with `in_flight` rollouts together; `file`: prompts from a file."""
    given: dict[str, Mapping[str, object]] = {
        "dispatch": {"max_inflight_rollouts": in_flight // count},
        "reward_workers": {"processes": max(1, REWARD_WORKERS // count)},
        "store": {"url": store},
    }
    files = {"bench_rewards.py": REWARDS}
    if file:
        given["prompts"] = {"path": PROMPTS_FILE, "epochs": 0}
        files[PROMPTS_FILE] = prompts(PROMPTS)
    toml = serving.config(engine_url, given | dict(tables or {}))
    with ExitStack() as stack:
        running = []
        for _ in range(count):
            folder = stack.enter_context(processes.folder())
            running.append(stack.enter_context(processes.service(toml, files, within=folder)))
            unpin(running[-1].pid)
        yield running


def family(pid: int) -> list[int]:
    """Process `pid` and those under it that live now."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended since the listing
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:  # it grows meanwhile
        found += children.get(one, [])
    return found


def unpin(pid: int) -> None:
    """Let a process, its threads and its children have every core."""
    cores = set(range(os.cpu_count() or 1))
    for process in family(pid):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def server_cpu_seconds(pid: int) -> float:
    """CPU seconds of a PostgreSQL by its first process: its own, its children's, and theirs that have ended."""
    total = 0.0
    for process in family(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since it was listed: the first process has waited for it
            continue
        total += sum(map(int, fields[11:15])) / TICK
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the database itself has counted since it was made."""

    commits: int
    """Transactions that were committed."""
    wal_bytes: int
    """Of the whole server."""
    busy_ms: float
    """Time its sessions ran statements or had a transaction open."""
    moves: int
    """Updates of rows of `groups`."""


async def counted(url: str) -> Counted:
    connection = await asyncpg.connect(url)
    try:
        # What a session did reaches the counters within a second of its end; a window is many.
        row = await connection.fetchrow(
            "SELECT d.xact_commit, d.active_time + d.idle_in_transaction_time AS busy_ms,"
            " pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS wal_bytes, t.n_tup_upd"
            " FROM pg_stat_database AS d, pg_stat_user_tables AS t"
            " WHERE d.datname = current_database() AND t.relname = 'groups'"
        )
    finally:
        await connection.close()
    if row is None:
        raise RuntimeError("the database counts nothing")
    return Counted(
        commits=row["xact_commit"], wal_bytes=row["wal_bytes"], busy_ms=row["busy_ms"], moves=row["n_tup_upd"]
    )


def commits_per_s(cluster: Cluster, clients: int, seconds: int) -> float:
    """Durable commits a second of transactions that change one row each, `clients` at a time, by pgbench."""
    with database(cluster) as url, processes.folder() as folder:
        script = folder / "one_row.sql"
        script.write_text("UPDATE counters SET n = n + 1 WHERE id = :client_id;\n")
        statement = "CREATE TABLE counters AS SELECT id, 0 AS n FROM generate_series(0, 63) AS id"
        asyncio.run(cluster.execute(statement, url.rpartition("/")[2]))
        command = [program("pgbench"), "-n", "-f", str(script), "-c", str(clients), "-T", str(seconds), url]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("tps = "))
    return float(line.split()[2])
